"""Adasum: each rank steps by itself, and the steps are combined.

The combination of Maleki et al. 2020 adds what is orthogonal and averages what is parallel. It is applied to what the
optimizer did to the parameters and not to gradients, so that it works with any optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from horo_lite.interfaces import Reduction
from horo_lite.torch.compressor_states import ParameterState
from horo_lite.torch.device_buckets import make_buckets
from horo_lite.torch.roster import Roster
from horo_lite.torch.settings import Settings
from horo_lite.torch.slots import Slot


class AdasumExchange:
    """The steps of one optimizer's parameters, in place of ``GradientExchange``."""

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings) -> None:
        self.window = settings.passes
        self._settings = settings
        self._optimizer = weakref.ref(optimizer)
        self._plan()

    def _plan(self) -> None:
        optimizer: Any = self._optimizer()
        parameters = [(name, p) for name, p in self._settings.naming.names(optimizer) if p.requires_grad]
        self._states = [ParameterState(optimizer, p) for _, p in parameters]
        self._buckets = make_buckets(
            parameters,
            self._states,
            groups=None,
            label=type(optimizer).__name__,
            process_set=self._settings.process_set,
            op=Reduction.ADASUM,
            compression=self._settings.compression,
            bucket_bytes=self._settings.bucket_bytes,
            overlap=False,
        )
        self._slots = []
        for number, (name, parameter) in enumerate(parameters):
            self._slots.append(Slot(name, parameter))
            self._slots[-1].bind(number, self._buckets.views[number])
        self._roster = Roster(optimizer)

    def step(self, update: Callable[[], Any]) -> Any:
        """Let the optimizer step, then combine all ranks' steps."""
        optimizer: Any = self._optimizer()
        if not self._roster.holds(optimizer):
            self.close()
            self._plan()
        with torch.no_grad():
            starts = [slot.parameter.detach().clone() for slot in self._slots]
        loss = update()
        with torch.no_grad():
            for slot, start in zip(self._slots, starts, strict=True):
                if slot.parameter.grad is not None:
                    slot.put(slot.parameter - start)
                    self._buckets.ready(slot.number)
            used = self._buckets.finish()
            for slot, start, was_used in zip(self._slots, starts, used, strict=True):
                if was_used:
                    slot.parameter.copy_(start.add_(slot.value()))
        for state in self._states:
            state.settle()
        return loss

    def begin_step(self) -> None:
        """Nothing: gradients are not exchanged."""

    def complete(self) -> None:
        """Nothing: gradients are not exchanged."""

    def forget(self) -> None:
        """Nothing: gradients are not exchanged."""

    def close(self) -> None:
        """Let go of the buckets."""
        self._buckets.close()
