"""The gradients of one list of parameters through the buckets, step after step, and from one world to the next."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from horo_lite.arrays import flat
from horo_lite.context import current
from horo_lite.exchange_options import ExchangeOptions, ParameterSpec
from horo_lite.gradients import GradientBuckets
from horo_lite.interfaces import Array


class BucketExchange:
    """Buckets that are made anew when the world is: a traced step outlives it, where training goes on after a failure.

    Making it is collective over the process set.

    Args:
        options: how.
        parameters: name, shape and element type of each gradient.
        variables: what the caller's groups are made of, one per parameter.
        device: "cpu", or torch's name of a device.

    Attributes:
        buckets: of the present world.
        context: that world.
    """

    def __init__(
        self,
        options: ExchangeOptions,
        parameters: Sequence[ParameterSpec],
        variables: Sequence[Any],
        device: str = "cpu",
    ) -> None:
        self._made_with = list(parameters), list(variables), device
        self._options = options
        self._make()

    def _make(self) -> None:
        self.context = current()
        self.buckets: GradientBuckets = self._options.buckets(*self._made_with)

    def renew(self) -> None:
        """Before a step: new buckets in a new world, with what compressors have kept."""
        if self.context is not current():
            kept = self.states
            self._make()
            for name, state in self.states.items():
                state.update(kept[name])

    @property
    def states(self) -> dict[str, MutableMapping[str, Any]]:
        """By parameter's name, what a compressor keeps from step to step."""
        return self.buckets.states

    def put(self, index: int, gradient: Array) -> None:
        """Copy a gradient into its place. From now on it may be reduced."""
        self.buckets.views[index][:] = flat(gradient)
        self.buckets.ready(index)

    def finish(self) -> list[bool]:
        """Wait for the step's gradients; per parameter, whether some rank had one."""
        return self.buckets.finish()

    def result(self, index: int) -> Array:
        """A reduced gradient: the bucket's own memory, flat, valid until the next step."""
        return self.buckets.views[index]

    def reduce(self, gradients: Sequence[Array | None]) -> list[Array | None]:
        """A whole step at once, last layers first; None where no rank has a gradient."""
        self.renew()
        for index in reversed(range(len(gradients))):
            gradient = gradients[index]
            if gradient is not None:
                self.put(index, gradient)
        return [self.result(index) if used else None for index, used in enumerate(self.finish())]
