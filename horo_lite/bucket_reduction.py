"""What happens to one bucket: its gradients are reduced as they are, by Adasum, or through a compressor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, MutableMapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from horo_lite.buckets import Bucket, BucketPlan, common_fate
from horo_lite.compression import Cast
from horo_lite.engine import Fabric
from horo_lite.engine.compressed import cast_reduced, compressed
from horo_lite.engine.memory import BucketMemory
from horo_lite.interfaces import Array, Compressor, Reduction, Schedule

Used: TypeAlias = Generator[Any, Any, "tuple[list[bool], bool | None]"]
"""A schedule that returns which gradients any rank had, one value per slot, and the common fate of the ranks' steps
(``Bucket.read_used``)."""


class BucketReduction:
    """The reduction of the buckets of one plan, in place; what can be done once is done here.

    Args:
        plan: the buckets.
        memory: where they are.
        fabric: the ranks that take part.
        op: Average, Sum or Adasum.
        scales: the pre- and the postscale factor.
        compressors: one per bucket, bound to its gradients; None for the gradients themselves.
        device: "cpu", or torch's name of a device.
    """

    def __init__(
        self,
        plan: BucketPlan,
        memory: BucketMemory,
        fabric: Fabric,
        op: Reduction,
        scales: tuple[float, float],
        compressors: Sequence[Compressor] | None,
        device: str,
    ) -> None:
        self._memory = memory
        self._fabric = fabric
        self._op = op
        self._scales = scales
        self._compressors: list[Compressor | None] = [
            None if isinstance(compressor, Cast) and not compressor.shortens(bucket.type_name) else compressor
            for bucket, compressor in zip(plan.buckets, compressors or itertools.repeat(None), strict=False)
        ]
        self._device = device
        self._dense_bytes = [sum(slot.spec.nbytes for slot in bucket.slots) for bucket in plan.buckets]
        self._reducers = [self._reducer(bucket) for bucket in plan.buckets]

    def _reducer(self, bucket: Bucket) -> Callable[[], Schedule]:
        peers = None if self._memory.peers is None else self._memory.peers[bucket.index]
        return self._fabric.bucket_reducer(
            self._memory.mine[bucket.index], peers, bucket.type_name, self._op, *self._scales, self._device
        )

    def close(self) -> None:
        """Let go of the memory of other ranks."""
        self._reducers = []

    def schedule(
        self, bucket: Bucket, used: list[bool], states: Sequence[MutableMapping[str, Any]], failed: bool | None
    ) -> Used:
        """Schedule: one bucket.

        Args:
            used: which of its gradients this rank has, one value per slot.
            states: per gradient of the plan, what its compressor keeps.
            failed: how this rank's step went; None on a rank that has joined.
        """
        dense_bytes = self._dense_bytes[bucket.index]
        self._fabric.stats.dense_bytes += dense_bytes
        compressor = self._compressors[bucket.index]
        if compressor is not None:
            yield from self._compressed(compressor, bucket, states)
            return (yield from self._gather_used(used, failed))
        self._fabric.stats.payload_bytes += dense_bytes
        if self._op is Reduction.ADASUM:
            yield from self._adasum(bucket)
            return (yield from self._gather_used(used, failed))
        buffer = self._memory.mine[bucket.index]
        bucket.write_used(buffer, used, failed)
        yield from self._reducers[bucket.index]()
        return bucket.read_used(buffer)

    def _compressed(
        self, compressor: Compressor, bucket: Bucket, states: Sequence[MutableMapping[str, Any]]
    ) -> Schedule:
        views = bucket.views(self._memory.mine[bucket.index])
        prescale, postscale = self._scales
        if prescale != 1.0:
            for view in views:
                view *= prescale
        if self._op is not Reduction.AVERAGE and isinstance(compressor, Cast):
            gradients, boundaries = self._gradients(bucket)
            adasum = self._op is Reduction.ADASUM
            yield from cast_reduced(
                gradients, compressor, self._fabric, self._op, postscale, boundaries if adasum else None
            )
            return
        own_states = [states[slot.index] for slot in bucket.slots]
        reduced = yield from compressed(compressor, views, own_states, self._fabric)
        factor = postscale * (self._fabric.size if self._op is Reduction.SUM else 1)
        for view, mean in zip(views, reduced.mean, strict=True):
            view[:] = mean
            if factor != 1.0:
                view *= factor

    def _adasum(self, bucket: Bucket) -> Schedule:
        gradients, boundaries = self._gradients(bucket)
        return self._fabric.adasum(gradients, bucket.type_name, boundaries, *self._scales, self._device)

    def _gradients(self, bucket: Bucket) -> tuple[Array, tuple[int, ...]]:
        """All of a bucket's gradients in one array, and where each begins (and the last ends)."""
        boundaries = (*(slot.start for slot in bucket.slots), bucket.used_start)
        return self._memory.mine[bucket.index][: bucket.used_start], boundaries

    def _gather_used(self, used: list[bool], failed: bool | None) -> Used:
        """A small message of its own, where the used bits can't travel in the bucket."""
        flags = np.array([*used, failed is True, failed is False], np.uint8)
        yield from self._fabric.allreduce(flags, "uint8", Reduction.MAX, staged=False)[0]
        *used, any_failed, any_succeeded = (bool(flag) for flag in flags)
        return used, common_fate(any_failed, any_succeeded)
