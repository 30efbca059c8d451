"""A few elements in place of all.

Where each rank selects its own (topk, threshold), the payload is an int32 index and a value for each, gathered: every
rank receives (N-1) payloads. Where all select the same (randomk), values alone are summed on the ring.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from horo_lite.arrays import as_bytes, item_bytes
from horo_lite.compression.backend import Backend, backend_of, quiet
from horo_lite.compression.base import Bucket, Exchange, Method, State, check_between
from horo_lite.errors import ArgumentError
from horo_lite.interfaces import Array, GatherRequest, Group

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
        if self.value_type not in _VALUE_TYPES:
            raise ArgumentError(
                f"value_type is {self.value_type!r}; expected one of {', '.join(_VALUE_TYPES)}"
            )

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


def kept(ratio: float, elements: int) -> int:
    """How many of a gradient's elements a ratio keeps."""
    return max(1, round(ratio * elements))


def _index_type(bucket: Bucket) -> str:
    return "int32" if bucket.layout.total < 1 << 31 else "int64"
