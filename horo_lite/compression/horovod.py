"""Compressors written for Horovod: a class with static ``compress(tensor)`` and ``decompress(tensor, ctx)``.

Where ``compress`` returns floats, they are summed as Horovod does, and ``decompress`` is given the
mean. Where it returns anything else (bytes, integers), a sum would be wrong: payloads and contexts
are gathered, each is decompressed, and the mean is taken after that.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from horo_lite.arrays import flat, is_torch
from horo_lite.compression.backend import is_floating
from horo_lite.compression.base import Bucket, Exchange, Layout, Method, State, label
from horo_lite.compression.exchange import average
from horo_lite.errors import ArgumentTypeError
from horo_lite.interfaces import Array, GatherRequest, Group, SumRequest


class Compressed(NamedTuple):
    """What a user's ``compress`` made of one gradient."""

    values: Array  # flat
    shape: tuple[int, ...]
    ctx: Any


@dataclasses.dataclass(frozen=True, repr=False)
class HorovodStyle(Method):
    """A user's own class as a ``Compressor``.

    Args:
        user: the class, or an instance.
        to_tensor: makes the framework's tensor of a numpy array; the adapters pass theirs.
    """

    user: Any
    to_tensor: Callable[[Array], Any] = np.asarray

    def __repr__(self) -> str:
        return label(self.user)

    def exchange(self, bucket: Bucket, states: Sequence[State], group: Group) -> Exchange:
        own = self._compressed(bucket)
        if all(is_floating(c.values) and c.values.dtype == own[0].values.dtype for c in own):
            mean = yield SumRequest(bucket.backend.join([c.values for c in own]), 1.0 / group.size)
            means = Layout(tuple(len(c.values) for c in own)).split(mean)
            averaged = [c._replace(values=m) for c, m in zip(own, means, strict=True)]
            result = self._decompressed(averaged, bucket)
        else:
            payloads = yield GatherRequest(np.frombuffer(pickle.dumps(own), np.uint8))
            # Pickles of a moment ago, from ranks of this very job.
            decoded = [self._decompressed(pickle.loads(p.tobytes()), bucket) for p in payloads]
            result = average(decoded)
        return bucket.reduced(result, lambda: self._decompressed(own, bucket))

    def _compressed(self, bucket: Bucket) -> list[Compressed]:
        """Each gradient through the user's ``compress``, in its parameter's shape where that is known."""
        sizes = bucket.layout.sizes
        shapes = [p.shape for p in self.parameters] or [(elements,) for elements in sizes]
        out = []
        for piece, shape in zip(bucket.layout.split(bucket.own), shapes, strict=True):
            answer = self.user.compress(self.to_tensor(piece.copy().reshape(shape)))
            if not (isinstance(answer, (tuple, list)) and len(answer) == 2 and hasattr(answer[0], "shape")):
                raise ArgumentTypeError(
                    f"{self!r}: compress(tensor) returned {type(answer).__name__}; expected two, (tensor, ctx): what "
                    "is sent, and anything (None) that decompress(tensor, ctx) needs"
                )
            tensor, ctx = answer
            out.append(Compressed(_values(tensor), tuple(tensor.shape), ctx))
        return out

    def _decompressed(self, sent: Sequence[Compressed], bucket: Bucket) -> Array:
        """One flat array of new memory."""
        tensors = [
            self.user.decompress(self.to_tensor(c.values.reshape(c.shape)), c.ctx) for c in sent
        ]
        wrong = [type(tensor).__name__ for tensor in tensors if not hasattr(tensor, "shape")]
        if wrong:
            raise ArgumentTypeError(f"{self!r}: decompress(tensor, ctx) returned {wrong[0]}; expected a tensor")
        return np.concatenate([_values(tensor).astype(bucket.work_type) for tensor in tensors])


def _values(tensor: Any) -> Array:
    """A framework's tensor as a flat array."""
    return flat(tensor if is_torch(tensor) else np.asarray(tensor))
