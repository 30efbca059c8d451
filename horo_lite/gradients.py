"""Gradients in buckets: what a distributed optimizer or tape of any framework is made on.

The adapter puts each gradient into its view, says so (``ready``), and calls ``finish`` once a step; afterwards the
views hold the reduced gradients. The plan is agreed on once; a step negotiates, allocates and pickles nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from horo_lite.arrays import check_supported
from horo_lite.bucket_reduction import BucketReduction
from horo_lite.buckets import Bucket, BucketPlan, BucketProgress, GradientSpec, plan
from horo_lite.compression import Frozen, resolve
from horo_lite.context import current
from horo_lite.engine.agree import agree_on_plan, gather_bytes, refuse_plan
from horo_lite.engine.agreement import description
from horo_lite.engine.compressed import check_reduces
from horo_lite.engine.memory import BucketMemory, keep_freed, private_memory, shared_memory
from horo_lite.engine.overlap import OverlapChoice, core_is_free
from horo_lite.engine.places import Place
from horo_lite.engine.planned import PlannedOperation
from horo_lite.errors import ArgumentError, ArgumentTypeError, HorovodInternalError
from horo_lite.interfaces import Array, Compressor, Parameter, Reduction, Schedule
from horo_lite.process_sets import ProcessSet, global_process_set


class GradientBuckets:
    """The gradients of one model part, reduced together step by step. Making it is collective over the process set.

    Args:
        parameters: (name, shape, element type) of each gradient; names are unique; the same on every rank.
        process_set: the ranks that take part.
        op: Average, Sum or Adasum.
        prescale_factor: every gradient is multiplied by it before the reduction.
        postscale_factor: the result is multiplied by it.
        compression: what goes on the wire (``hvd.Compression``), None for the gradients themselves.
        states: per gradient, what a compressor keeps from step to step; made here when None.
        bucket_bytes: about the size of a bucket; by default ``HORO_LITE_BUCKET_BYTES``.
        groups: a number of groups, or lists of gradient indices that travel as one unit.
        label: what messages call it.
        device: "cpu", or torch's name of a device.
        overlap: reduce buckets while backward goes on: True, False, or "auto" (tried out on the first steps).
        alike: what else of the caller's settings must be the same on every rank.

    Attributes:
        views: per gradient, a flat array: its place in its bucket.
        number: what the lane knows the plan by.
        in_use: made, and neither closed nor dropped.

    Raises:
        DisagreementError: ranks differ; on every rank, with the first differing parameter and both values.
    """

    in_use = False

    def __init__(
        self,
        parameters: Sequence[tuple[str, Sequence[int], str]],
        *,
        process_set: ProcessSet = global_process_set,
        op: Reduction = Reduction.AVERAGE,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        compression: Any = None,
        states: Sequence[MutableMapping[str, Any]] | None = None,
        bucket_bytes: int | None = None,
        groups: int | Sequence[Sequence[int]] | None = None,
        label: str = "optimizer",
        device: str = "cpu",
        overlap: bool | str = "auto",
        alike: Mapping[str, object] | None = None,
    ) -> None:
        context = current()
        member = process_set.member()
        if member.planned is None:
            raise ArgumentError(f"rank {context.rank} is not in {process_set}")
        self.label = label
        self._engine = context.engine
        self._lane = member.planned
        self._fabric = self._lane.fabric
        try:
            size = context.config.bucket_bytes if bucket_bytes is None else bucket_bytes
            self._plan = _planned(parameters, size, groups)
            self._op = Reduction(op)
            self._scales = float(prescale_factor), float(postscale_factor)
            _check_parameters(parameters, self._op, device)
            self._compressors = self._bind(compression)
        except (ValueError, TypeError) as error:
            self._refuse(str(error))
            raise
        specs = self._plan.specs
        self._device = device
        self._states = states if states is not None else [{} for _ in specs]
        self._step = 0
        self._overlap = OverlapChoice(
            context.config.overlap if overlap == "auto" else ("on" if overlap else "off"),
            worth_trying=device == "cpu" and core_is_free(self._fabric.topology),
        )
        if device == "cpu":
            keep_freed(context.config.keep_freed_bytes)
        self._progress = BucketProgress(self._plan)
        self._launched: list[PlannedOperation] = []
        self._agrees_on_order = False
        self.number = self._lane.enter(self)
        self._memory = self._make_memory(alike or {})
        self.in_use = True
        self.views: list[Array] = [None] * len(specs)
        for bucket, buffer in zip(self._plan.buckets, self._memory.mine, strict=True):
            for slot, view in zip(bucket.slots, bucket.views(buffer), strict=True):
                self.views[slot.index] = view
        self._labels = [f"{label}, bucket {b.index} ({b.slots[0].spec.name}, ...)" for b in self._plan.buckets]
        self._reduction = BucketReduction(
            self._plan, self._memory, self._fabric, self._op, self._scales, self._compressors, device
        )
        self._used_anywhere = [False] * len(specs)

    def _refuse(self, fault: str) -> None:
        """Let the others, which wait to agree on the plan, know that this rank has none."""
        operation = PlannedOperation(
            f"{self.label}: agreement on the plan", Place(0, self._lane.enter(self), 0),
            lambda: refuse_plan(fault, self._fabric),
        )
        self._lane.submit(operation)
        self._engine.wake()

    def _bind(self, compression: Any) -> list[Compressor] | None:
        compressor = None if compression is None else resolve(compression)
        check_reduces(compressor, self._op)
        if compressor is None:
            return None
        return [
            compressor.bind([Parameter(s.spec.name, s.spec.shape) for s in bucket.slots])
            for bucket in self._plan.buckets
        ]

    def _make_memory(self, alike: Mapping[str, object]) -> BucketMemory:
        settings = {
            "op": self._op.name.title(),
            "scale factors": str(self._scales),
            "compression": description(self._compressors and self._compressors[:1]),
            "device": self._device.split(":")[0],
            **{name: str(value) for name, value in alike.items()},
        }

        def make() -> Schedule:
            yield from agree_on_plan(self._plan, settings, self.label, self._fabric)
            own = json.dumps([self._overlap.worth_trying, self._lane.in_use()]).encode()
            everyone = [json.loads(each) for each in (yield from gather_bytes(own, self._fabric))]
            # Where buckets may go before the last is complete; nodes may differ in what is worth trying.
            self._agrees_on_order = len(self._plan.buckets) > 1 and all(worth for worth, _ in everyone)
            self._lane.let_go({number for _, in_use in everyone for number in in_use})
            if self._device != "cpu" or self._compressors is not None or self._op is Reduction.ADASUM:
                return private_memory(self._plan, self._device)
            return (yield from shared_memory(self._plan, self._fabric))

        operation = PlannedOperation(f"{self.label}: agreement on the plan", Place(0, self.number, 0), make)
        self._lane.submit(operation)
        memory: BucketMemory = self._engine.wait(operation.handle)
        return memory

    @property
    def states(self) -> dict[str, MutableMapping[str, Any]]:
        """By gradient's name, what a compressor keeps from step to step."""
        return {spec.name: state for spec, state in zip(self._plan.specs, self._states, strict=True)}

    # --- a step --------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Some gradient of the present step is ready and ``finish`` has not been called."""
        return any(self._progress.ready)

    def ready(self, index: int) -> None:
        """The gradient ``index`` is in its view. From now on it may be reduced: do not touch it until ``finish``."""
        if self._progress.put(index) and self._overlap.on:
            for bucket in self._progress.due():
                self._launch(bucket)
            if self._launched:
                self._engine.wake()

    def finish(self, failed: bool = False) -> list[bool]:
        """Reduce what has not been reduced yet, and wait for all. Gradients that are not ready go as zeros.

        Args:
            failed: this step came to nothing on this rank after some gradients were ready. That is an error on every
                rank, unless it happened to all.

        Returns:
            per gradient: some rank had it in this step. Where none had, the view holds zeros.

        Raises:
            HorovodInternalError: another rank failed or is out of step.
        """
        try:
            for bucket in self._progress.rest():
                self._launch(bucket, failed)
            if self._launched:
                last = self._launched[-1]
                self._engine.drive(lambda: last.handle.finished, last.handle)
            for operation in self._launched:
                operation.handle.result()
            if self._agrees_on_order:
                self._engine.wait(self._agree_on_order(self._step).handle)
            return list(self._used_anywhere)
        finally:
            self._step += 1
            self._overlap.step_ended()
            self._progress.begin()
            self._launched = []

    def _launch(self, index: int, failed: bool = False) -> None:
        bucket = self._plan.buckets[index]
        ready = self._progress.ready
        used = [ready[slot.index] for slot in bucket.slots]
        for slot, is_used in zip(bucket.slots, used, strict=True):
            if not is_used:
                self.views[slot.index][:] = 0
        operation = PlannedOperation(
            self._labels[index],
            Place(self.number, self._step, index),
            lambda: self._reduce(bucket, used, self._states, failed),
        )
        self._launched.append(operation)
        self._lane.submit(operation)

    def _reduce(
        self, bucket: Bucket, used: list[bool], states: Sequence[MutableMapping[str, Any]], failed: bool | None
    ) -> Schedule:
        """Schedule: one bucket. ``failed`` says how this rank's step went; None on a rank that has joined."""
        used, fate = yield from self._reduction.schedule(bucket, used, states, failed)
        if failed is not None and fate is not failed:
            where = "this rank but not on all others" if failed else "another rank"
            raise HorovodInternalError(
                f"{self.label}: a backward pass failed midway on {where}, when some of its gradients were under way; "
                "the gradients of this step are of no use on any rank"
            )
        for slot, is_used in zip(bucket.slots, used, strict=True):
            self._used_anywhere[slot.index] = is_used

    def _agree_on_order(self, step: int) -> PlannedOperation:
        """After the first step: buckets go in the order in which they were complete on the first rank."""
        order = np.array(self._progress.as_completed(), np.int32)

        def agree() -> Schedule:
            yield from self._fabric.broadcast(order, 0)
            self._progress.order = [int(index) for index in order]
            self._agrees_on_order = False

        operation = PlannedOperation(
            f"{self.label}: agreement on the order of buckets", Place(self.number, step, len(order)), agree
        )
        self._lane.submit(operation)
        return operation

    def take_part(self, step: int, bucket: int) -> None:
        """For the lane, on a rank that has called ``join()``: submit a bucket of zeros."""
        if bucket == len(self._plan.buckets):
            self._agree_on_order(step)
            return
        self._step = step + (bucket == self._progress.order[-1])
        chosen = self._plan.buckets[bucket]
        self._memory.mine[bucket][:] = 0
        states = [Frozen(state) for state in self._states]
        operation = PlannedOperation(
            f"{self.label}, bucket {bucket} after join()", Place(self.number, step, bucket),
            lambda: self._reduce(chosen, [False] * len(chosen.slots), states, None),
        )
        self._lane.submit(operation)

    def close(self) -> None:
        """Let go of shared memory; views stay valid as long as somebody holds them. A step under way has failed."""
        try:
            if self.in_use and self.pending and self._lane in self._engine.lanes:
                self.finish(failed=True)
        finally:
            self.in_use = False
            self._memory.close()
            self._reduction.close()

    def __del__(self) -> None:
        # Ranks with more data than this one go on, and once it has called join() it takes part in what they reduce.
        # So the lane brings the buckets back to life, until the next plan is made and no rank uses them.
        if self.in_use and self._fabric.size > 1 and self._lane in self._engine.lanes:
            self.in_use = False
            self._states = [{} for _ in self._states]  # these hold the model
            self._lane.keep(self)



def _check_parameters(parameters: Sequence[tuple[str, Sequence[int], str]], op: Reduction, device: str) -> None:
    for name, _, kind in parameters:
        if device == "meta":
            raise ArgumentError(
                f"{name} is on device meta and has no values: make the model real before, as in "
                'model.to_empty(device="cpu"), and give it values'
            )
        try:
            check_supported(kind, op)
        except ArgumentTypeError as error:
            raise ArgumentTypeError(f"{name}: {error}") from None


def _planned(
    parameters: Sequence[tuple[str, Sequence[int], str]],
    bucket_bytes: int,
    groups: int | Sequence[Sequence[int]] | None,
) -> BucketPlan:
    specs = [GradientSpec(name, tuple(shape), kind) for name, shape, kind in parameters]
    if groups is None or isinstance(groups, int):
        return plan(specs, bucket_bytes, groups)
    return plan(specs, bucket_bytes, [[specs[index].name for index in group] for group in groups])
