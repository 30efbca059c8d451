"""A few elements in place of all.

Where each rank selects its own (topk, threshold), the payload is an int32 index and a value for each, gathered: every
rank receives (N-1) payloads. Where all select the same (randomk), values alone are summed on the ring.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from horo_lite.arrays import as_bytes, item_bytes
from horo_lite.compression.backend import Backend, backend_of, quiet
from horo_lite.compression.base import (
    Bucket,
    Exchange,
    Layout,
    Method,
    State,
    check_between,
    check_count,
    next_draw,
)
from horo_lite.compression.feedback import WithFeedback
from horo_lite.compression.momentum import keep_velocity, velocity
from horo_lite.errors import ArgumentError
from horo_lite.interfaces import Array, GatherRequest, Group, SumRequest

_VALUE_TYPES = ("float32", "float16", "bfloat16", "float64")


@dataclasses.dataclass(frozen=True, repr=False)
class Selected(Method):
    """The frame of methods whose ranks select elements for themselves.

    Args:
        value_type: the type in which values travel.
        feedback: keep what was not sent for the next step.
    """

    value_type: str = dataclasses.field(default="float32", kw_only=True)
    feedback: bool = dataclasses.field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        check_value_type(self.value_type)

    def select(self, piece: Array) -> Array:
        """Ascending indices of the elements of one gradient that are sent; any that isn't finite is among them."""
        raise NotImplementedError

    def exchange(self, bucket: Bucket, states: Sequence[State], group: Group) -> Exchange:
        own = self._encode(bucket)
        payloads = yield GatherRequest(own)
        mean = self._add(bucket, payloads)
        return bucket.reduced(mean, lambda: self._add(bucket, [own]))

    @quiet
    def _encode(self, bucket: Bucket) -> Array:
        backend, layout = bucket.backend, bucket.layout
        chosen = [
            self.select(piece) + start
            for piece, start in zip(layout.split(bucket.flat), layout.starts(), strict=True)
            if len(piece)
        ]
        indices = backend.join(chosen)
        values = backend.convert(bucket.flat[indices], self.value_type)
        indices = backend.convert(indices, _index_type(bucket))
        return backend.join([as_bytes(indices), as_bytes(values)])

    @quiet
    def _add(self, bucket: Bucket, payloads: Sequence[Array]) -> Array:
        """The mean of sparse payloads as a dense array, added in rank order."""
        backend = bucket.backend
        out = backend.zeros(bucket.layout.total, bucket.work_type)
        for payload in payloads:
            indices, values = self._decode(payload, bucket, backend)
            out[indices] += values  # no index occurs twice in one payload
        if len(payloads) > 1:
            out /= len(payloads)
        return out

    def _decode(self, payload: Array, bucket: Bucket, backend: Backend) -> tuple[Array, Array]:
        index_type = _index_type(bucket)
        pair_bytes = item_bytes(index_type) + item_bytes(self.value_type)
        split = len(payload) // pair_bytes * item_bytes(index_type)
        indices = backend.view(payload[:split], index_type)
        values = backend.view(payload[split:], self.value_type)
        return indices, backend.convert(values, bucket.work_type)


@dataclasses.dataclass(frozen=True, repr=False)
class TopK(Selected):
    """The ``ratio`` of each gradient's elements with the largest magnitude, at least one; exactly that many.

    Aji and Heafield 2017 (arXiv 1704.05021), Stich et al. 2018 (arXiv 1809.07599).

    Args:
        ratio: the share of elements that is sent.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("ratio", self.ratio, 0, 1, "Compression.topk(0.01)")

    def select(self, piece: Array) -> Array:
        return backend_of(piece).largest(piece, kept(self.ratio, len(piece)))


@dataclasses.dataclass(frozen=True, repr=False)
class Threshold(Selected):
    """The elements with a magnitude of at least ``threshold``: a payload that grows and shrinks with the gradient.

    Strom 2015, who sends one bit for each; here values are sent.

    Args:
        threshold: the smallest magnitude that is sent.
    """

    threshold: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("threshold", self.threshold, 0, float("inf"), "Compression.threshold(0.01)")

    def select(self, piece: Array) -> Array:
        backend = backend_of(piece)
        small = backend.xp.abs(piece) < self.threshold  # false for NaN
        return backend.where_true(~small)


@dataclasses.dataclass(frozen=True, repr=False)
class RandomK(Method):
    """The same random elements of each gradient on every rank, so that values are summed without indices.

    Stich et al. 2018 (arXiv 1809.07599), Wangni et al. 2018 (arXiv 1710.09854).

    Args:
        ratio: the share of elements that is sent.
        seed: together with step and bucket it fixes the selection; the same on all ranks.
        value_type: the type in which values travel.
        scaled: divide by ``ratio``, which makes the mean right on average; off under error feedback, which would
            diverge with it.
        feedback: keep what was not sent for the next step.
    """

    ratio: float = 0.01
    seed: int = dataclasses.field(default=0, kw_only=True)
    value_type: str = dataclasses.field(default="float32", kw_only=True)
    scaled: bool = dataclasses.field(default=True, kw_only=True)
    feedback: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_value_type(self.value_type)
        check_between("ratio", self.ratio, 0, 1, "Compression.randomk(0.01)")

    def contraction(self) -> RandomK:
        return self.altered(scaled=False)

    def exchange(self, bucket: Bucket, states: Sequence[State], group: Group) -> Exchange:
        backend, layout = bucket.backend, bucket.layout
        draw = next_draw(states)
        indices = backend.indices(self._chosen(layout, draw, self.salt(bucket)))
        values = self._values(bucket, indices)
        mean = yield SumRequest(backend.convert(values, self.value_type), 1.0 / group.size)

        def spread(some: Array) -> Array:
            out = backend.zeros(layout.total, bucket.work_type)
            out[indices] = backend.convert(some, bucket.work_type)
            return out

        return bucket.reduced(spread(mean), lambda: spread(values))

    def _chosen(self, layout: Layout, *words: int) -> np.ndarray:
        """Ascending indices into the bucket, drawn on the host so that every device draws the same."""
        random = np.random.Generator(np.random.SFC64(np.random.SeedSequence((self.seed, *words))))
        parts = [
            start
            + np.sort(random.choice(size, kept(self.ratio, size), replace=False, shuffle=False))
            for start, size in zip(layout.starts(), layout.sizes, strict=True)
            if size
        ]
        return np.concatenate(parts)

    @quiet
    def _values(self, bucket: Bucket, indices: Array) -> Array:
        """What is sent: NaN where the bucket holds any value that is not finite, selected or not."""
        values = bucket.flat[indices]
        if self.scaled:
            counts = [kept(self.ratio, size) if size else 0 for size in bucket.layout.sizes]
            for part, size in zip(
                Layout(tuple(counts)).split(values), bucket.layout.sizes, strict=True
            ):
                part *= size / max(1, len(part))
        return values if bucket.backend.finite(bucket.flat) else values * math.nan


@dataclasses.dataclass(frozen=True, repr=False)
class DGC(Method):
    """Deep Gradient Compression: top-k of a local momentum, for an optimizer without momentum of its own.

    Momentum correction (what accumulates is the velocity), momentum factor masking (a sent element's velocity starts
    again at zero), clipping, and warm-up of sparsity. Lin et al. 2018 (arXiv 1712.01887).

    Args:
        ratio: the share of elements that is sent; the paper's 99.9 % sparsity.
        momentum: the optimizer's, moved here.
        clip_norm: cut the local gradient of a bucket down to this norm over the square root of the ranks; None for
            never.
        warmup_steps: over so many steps the ratio falls exponentially from 25 %; the paper's four epochs.
        value_type: the type in which values travel.
        feedback: keep what was not sent for the next step.
    """

    own_feedback = True

    ratio: float = 0.001
    momentum: float = 0.9
    clip_norm: float | None = None
    warmup_steps: int = 0
    value_type: str = dataclasses.field(default="float32", kw_only=True)
    feedback: bool = dataclasses.field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        check_count("warmup_steps", self.warmup_steps, "Compression.dgc(warmup_steps=500)")
        check_value_type(self.value_type)
        check_between("ratio", self.ratio, 0, 1, "Compression.dgc(0.001)")

    @property
    def keeps_state(self) -> bool:
        return True

    def exchange(self, bucket: Bucket, states: Sequence[State], group: Group) -> Exchange:
        backend = bucket.backend
        sparse = TopK(self._ratio(next_draw(states, "sparsity_steps")), value_type=self.value_type)
        inner = WithFeedback(sparse) if self.feedback else sparse
        flat = velocity(self._clipped(bucket, group), states, self.momentum, 1.0)
        mean, contributed = yield from inner.reduce(bucket.layout.split(flat), states, group)
        whole = backend.join(mean)
        if self.momentum and backend.finite(whole):
            flat[backend.join(list(contributed)) != 0] = 0
            keep_velocity(flat, bucket, states)
        return bucket.reduced(whole, lambda: backend.join(list(contributed)))

    def _ratio(self, step: int) -> float:
        if step >= self.warmup_steps:
            return self.ratio
        return max(
            self.ratio, _FIRST_RATIO * (self.ratio / _FIRST_RATIO) ** (step / self.warmup_steps)
        )

    @quiet
    def _clipped(self, bucket: Bucket, group: Group) -> Bucket:
        if self.clip_norm is None:
            return bucket
        xp = bucket.backend.xp
        factor = self.clip_norm / math.sqrt(group.size) / bucket.backend.norm(bucket.flat)
        return bucket.replaced(bucket.flat * xp.where(factor < 1, factor, xp.ones_like(factor)))


_FIRST_RATIO = 0.25  # 75 % sparsity in the first epoch


def check_value_type(name: str) -> None:
    """Accept a float type.

    Raises:
        ArgumentError: it is none; names those that are.
    """
    if name not in _VALUE_TYPES:
        raise ArgumentError(f"value_type is {name!r}; expected one of {', '.join(_VALUE_TYPES)}")


def kept(ratio: float, elements: int) -> int:
    """How many of a gradient's elements a ratio keeps."""
    return max(1, round(ratio * elements))


def _index_type(bucket: Bucket) -> str:
    return "int32" if bucket.layout.total < 1 << 31 else "int64"
