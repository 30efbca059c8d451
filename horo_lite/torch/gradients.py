"""When gradients go: from autograd's hooks into buckets, and back into ``.grad``.

A hook on each parameter puts its gradient into its bucket, and in the last pass of a window hands it over, so that a
complete bucket may go while backward goes on. At the end of that backward all buckets are finished: ``.grad`` holds
reduced values when ``backward()`` returns. What backward could not do (a short window, no gradient at all on this
rank) ``complete`` does at ``step()``.

What must agree over ranks is how often each reduces: at least once per step, with gradients or without. A parameter
without a gradient counts as zero, and stays None where no rank has one.
"""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from horo_lite.functions import Sum
from horo_lite.gradients import GradientBuckets
from horo_lite.torch.compressor_states import ParameterState
from horo_lite.torch.device_buckets import DeviceBuckets, make_buckets
from horo_lite.torch.roster import Roster
from horo_lite.torch.settings import Settings
from horo_lite.torch.slots import Slot
from horo_lite.torch.sparse import SparseGradients

_PATIENCE = 2  # short windows in a row until they are taken for a mistake
_ordinals = itertools.count(1)  # for messages
_owners: Any = WeakIdKeyDictionary()  # parameter -> weak reference to the exchange that has hooked it


class GradientExchange:
    """The gradients of one optimizer's parameters. Making it is collective over the process set.

    Args:
        optimizer: the wrapped optimizer; it is not kept alive.
        settings: what the user asked for.

    Attributes:
        window: the backward passes of a full window.

    Raises:
        DisagreementError: ranks have different parameters; on every rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings) -> None:
        self.window = settings.passes
        self._ordinal = next(_ordinals)
        self._settings = settings
        self._optimizer = weakref.ref(optimizer)
        self._hooks: list[Any] = []
        self._slots: list[Slot] = []
        self._sparse = SparseGradients(optimizer, settings)
        self._task = -1
        self._end_of_backward: Any = None  # a weak reference to what autograd calls then; it dies with its graph task
        self._reductions = 0
        self._short_windows = 0
        self._plan()

    # --- the plan ------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Collective: hooks and buckets for the parameters that need a gradient now."""
        optimizer: Any = self._optimizer()
        previous = {id(slot.parameter): slot for slot in self._slots}
        self.close()
        named = self._settings.naming.names(optimizer)
        self._slots = [Slot(name, p) for name, p in named if p.requires_grad]
        for slot in self._slots:
            if (old := previous.get(id(slot.parameter))) is not None:
                slot.passes, slot.reduced = old.passes, old.reduced
            self._hook(slot)
        self._rows = [slot for slot in self._slots if self._sparse.goes_as_rows(slot.name)]
        self._dense = [slot for slot in self._slots if not self._sparse.goes_as_rows(slot.name)]
        self._states = [ParameterState(optimizer, slot.parameter) for slot in self._dense]
        first = f": {self._dense[0].name}, ..." if self._dense else ""
        try:
            self._buckets = self._make_buckets(f"optimizer {self._ordinal} ({type(optimizer).__name__}{first})")
        except BaseException:
            self._unhook()  # ranks disagree: others may wrap these parameters next
            raise
        for number, slot in enumerate(self._dense):
            slot.bind(number, self._buckets.views[number])
        self._roster = Roster(optimizer)
        self._stale = False

    def _hook(self, slot: Slot) -> None:
        """Take the parameter over from whichever exchange had it, and listen to it."""
        previous = _owners.get(slot.parameter)
        owner = None if previous is None else previous()
        if owner is not None and owner is not self:
            owner.release(slot.parameter)
        mine = _owners[slot.parameter] = weakref.ref(self)

        def after(_: torch.Tensor) -> None:
            if (exchange := mine()) is not None:
                exchange._arrived(slot)

        def before(_: torch.Tensor) -> None:
            if (exchange := mine()) is not None:
                exchange._arriving(slot)

        self._hooks.append(slot.parameter.register_post_accumulate_grad_hook(after))
        if self._settings.op == Sum:
            self._hooks.append(slot.parameter.register_hook(before))

    def _make_buckets(self, label: str) -> GradientBuckets | DeviceBuckets:
        s = self._settings
        numbers = {id(slot.parameter): number for number, slot in enumerate(self._dense)}
        groups = s.groups
        if groups is not None and not isinstance(groups, int):
            groups = [[numbers[id(p)] for p in group if id(p) in numbers] for group in groups]
        return make_buckets(
            [(slot.name, slot.parameter) for slot in self._dense],
            self._states,
            groups,
            label,
            process_set=s.process_set,
            op=s.op,
            prescale_factor=1.0 / s.predivide,
            postscale_factor=s.predivide,
            compression=s.compression,
            bucket_bytes=s.bucket_bytes,
            overlap=s.overlap,
            alike={
                "backward_passes_per_step": self.window,
                "average_over_passes": s.average_over_passes,
                "clip_norm": s.clip_norm,
                "sparse_as_dense": s.sparse_as_dense,
                "overlap": "at step()" if s.overlap is False else "in backward()",
            },
        )

    def release(self, parameter: torch.Tensor) -> None:
        """Another optimizer has been wrapped around this parameter: exchange it no longer."""
        for slot in self._slots:
            if slot.parameter is parameter:
                slot.released, slot.passes = True, 0
        if all(slot.released for slot in self._slots):
            self.close()
            self._slots = []

    def close(self) -> None:
        """Unhook, and let go of the buckets; ``.grad`` keeps its values."""
        if self._hooks:
            self._unhook()
            self._buckets.close()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __del__(self) -> None:
        self._unhook()

    # --- backward ------------------------------------------------------------------------------------------------

    @property
    def _at_once(self) -> bool:
        """Reduce at the end of a window's last backward; else at ``step()`` or ``synchronize()``."""
        return self._settings.overlap is not False

    def _arriving(self, slot: Slot) -> None:
        """The gradient of ``slot`` is about to be added to ``.grad``.

        Under Sum, what was reduced and not cleared is on every rank, and must not be counted N times.
        """
        if slot.reduced and slot.parameter.grad is not None:
            slot.parameter.grad.mul_(self._share)
        slot.reduced = False

    @property
    def _share(self) -> float:
        return 1.0 / self._settings.process_set.size() if self._settings.op == Sum else 1.0

    def _arrived(self, slot: Slot) -> None:
        """The gradient of ``slot`` has been added to ``.grad``."""
        if slot.released:
            return
        task = torch._C._current_graph_task_id()
        if task != self._task:
            if self._end_of_backward is not None and self._end_of_backward() is None:
                self._give_up()
            self._task = task
            ended = functools.partial(self._backward_ended)
            self._end_of_backward = weakref.ref(ended)
            torch.autograd.Variable._execution_engine.queue_callback(ended)
            self._stale = self._stale or self._outdated()
        slot.passes += 1
        if self._stale or slot.handed_over or slot.number < 0:
            return
        if not slot.fits(slot.parameter.grad):
            self._stale = True
            return
        is_last = slot.passes >= self.window
        self._take(slot, self._weight(slot, slot.passes) if is_last and self._at_once else 1.0)
        if is_last and self._at_once:
            slot.parameter.grad = None
            slot.handed_over = True
            self._buckets.ready(slot.number)

    def _outdated(self) -> bool:
        return not self._roster.holds(self._optimizer())  # type: ignore[arg-type]

    def _backward_ended(self) -> None:
        self._task, self._end_of_backward = -1, None
        if self._at_once and self._passes >= self.window:
            self._short_windows = 0
            self._reduce()

    @property
    def _passes(self) -> int:
        return max((slot.passes for slot in self._slots), default=0)

    # --- step ----------------------------------------------------------------------------------------------------

    def complete(self) -> None:
        """Collective: reduce what has come since the last reduction, or nothing if this step had none yet."""
        self._stale = self._stale or self._outdated()
        if not self._slots and not self._stale:
            return
        passes = self._passes
        if passes == 0 and self._reductions > 0:
            return
        if 0 < passes < self.window:
            self._short_windows += 1
            if self._short_windows == _PATIENCE:
                warnings.warn(
                    f"step() came after {passes} of backward_passes_per_step={self.window} backward passes, "
                    f"{_PATIENCE} times in a row; the gradients were reduced all the same. Call step() after every "
                    f"{self.window} passes, or set backward_passes_per_step={passes}",
                    stacklevel=3,
                )
        elif passes:
            self._short_windows = 0
        self._reduce()

    def begin_step(self) -> None:
        """Whatever was reduced before does not count for the step that begins."""
        self._reductions = 0

    def step(self, update: Callable[[], Any]) -> Any:
        """Let the optimizer update the parameters."""
        loss = update()
        self._reductions = 0
        for state in self._states:
            state.settle()
        return loss

    def forget(self) -> None:
        """Gradients are about to be cleared."""
        self._give_up()
        self._reductions = 0
        for slot in self._slots:
            slot.passes, slot.reduced = 0, False

    def _give_up(self) -> None:
        """If a backward has failed midway, let the other ranks know: an error, where it has not failed on all."""
        under_way = [slot for slot in self._dense if slot.handed_over]
        for slot in under_way:
            slot.passes, slot.handed_over = 0, False
        if under_way:
            self._buckets.finish(failed=True)

    # --- reducing ------------------------------------------------------------------------------------------------

    def _reduce(self) -> None:
        if self._stale or self._outdated():
            if any(slot.handed_over for slot in self._slots):
                self._exchange()  # to the other ranks these gradients have gone already
            self._plan()
        self._exchange()
        self._reductions += 1

    def _exchange(self) -> None:
        """One reduction of everything that has arrived."""
        passes = self._passes
        taken = [slot for slot in self._dense if slot.handed_over or self._hand_over(slot, passes)]
        try:
            used = self._buckets.finish()
        finally:
            late = [(slot, slot.parameter.grad) for slot in taken if slot.handed_over]
            for slot in taken:
                slot.passes, slot.handed_over = 0, False
        # Only now: after an error, no rows of this rank must wait for those of others.
        handles = [self._sparse.start(slot, self._weight(slot, passes)) for slot in self._rows]
        new_rows = self._sparse.agree()
        for slot, was_used in zip(self._dense, used, strict=True):
            if was_used and not slot.released:
                slot.reduced = True
                self._sparse.expose(slot)
        for slot, handle in zip(self._rows, handles, strict=True):
            rows = handle()
            slot.parameter.grad = rows if rows._nnz() else None
            slot.passes, slot.reduced = 0, True
        for slot, grad in late:
            if grad is not None:
                slot.add(grad, self._share)
                slot.expose()
                slot.passes, slot.reduced = 1, False
        if new_rows:
            self._plan()

    def _hand_over(self, slot: Slot, passes: int) -> bool:
        """Whatever ``.grad`` holds counts, new or not: on all ranks alike, what was reduced gives itself again."""
        grad = slot.parameter.grad
        if grad is None or slot.released or not slot.fits(grad):
            return False
        self._take(slot, self._weight(slot, passes))
        self._buckets.ready(slot.number)
        return True

    def _take(self, slot: Slot, weight: float) -> None:
        if slot.parameter.grad.is_sparse:
            self._sparse.seen[slot.name] = slot.parameter.grad.sparse_dim()
        slot.take(weight)

    def _weight(self, slot: Slot, passes: int) -> float:
        if slot.reduced and slot.passes == 0:
            return self._share
        return 1.0 / passes if self._settings.average_over_passes and passes > 1 else 1.0
