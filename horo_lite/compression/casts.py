"""No compression, and the casts to 16 bits: one all-reduce, on which every element travels by itself.

Payload 100 % and 50 % of float32. They ride the ring like any all-reduce (2(N-1)/N of the payload per rank).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from horo_lite.arrays import item_bytes, numpy_dtype
from horo_lite.arrays.types import FLOATS
from horo_lite.compression.backend import backend_of, is_floating, quiet
from horo_lite.compression.base import Bucket, Exchange, Method, State, plain_mean
from horo_lite.errors import ArgumentTypeError
from horo_lite.interfaces import Array, Group, SumRequest


@dataclasses.dataclass(frozen=True, repr=False)
class NoCompression(Method):
    """The gradients as they are. Keeps Horovod's static ``compress`` and ``decompress``."""

    def exchange(self, bucket: Bucket, states: Sequence[State], group: Group) -> Exchange:
        return (yield from plain_mean(bucket, group))

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """(tensor, None)."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor itself."""
        return tensor


@dataclasses.dataclass(frozen=True, repr=False)
class Cast(Method):
    """Floats wider than 16 bits as 16-bit floats; sums in float32, one rounding of each input and one of the mean.

    The mean's scale is part of the request, so 40000 on two ranks gives 40000 in float16. A single value beyond the
    type's range (65504 in float16) becomes infinite, which loss scaling sees, as in Horovod.
    """

    wire_type: ClassVar[str]

    def shortens(self, type_name: str) -> bool:
        """True for the types that it casts."""
        return type_name in FLOATS and item_bytes(type_name) > 2

    @quiet
    def narrow(self, array: Array) -> Array:
        """A flat array as it travels."""
        return backend_of(array).convert(array, self.wire_type)

    def exchange(self, bucket: Bucket, states: Sequence[State], group: Group) -> Exchange:
        if not self.shortens(bucket.type_name):
            return (yield from plain_mean(bucket, group))
        narrow = self.narrow(bucket.own)
        mean = yield SumRequest(narrow, 1.0 / group.size)
        return bucket.reduced(mean, lambda: bucket.backend.convert(narrow, bucket.type_name))

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Horovod's: (the tensor cast where it is a float, its former type). numpy, torch and TensorFlow tensors."""
        return _cast_tensor(tensor, cls.wire_type), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Horovod's: the tensor in the type that ``compress`` returned."""
        return _cast_tensor(tensor, ctx)


class Float16(Cast):
    """IEEE half precision: 11 significant bits, up to 65504, nothing below 6e-8. Micikevicius et al. 2018."""

    wire_type = "float16"


class BFloat16(Cast):
    """bfloat16: float32's range with 8 significant bits, so nothing overflows. Kalamkar et al. 2019."""

    wire_type = "bfloat16"


def _cast_tensor(tensor: Any, target: Any) -> Any:
    """A framework's tensor as another floating type; other tensors as they are."""
    torch, tensorflow = sys.modules.get("torch"), sys.modules.get("tensorflow")
    if torch is not None and isinstance(tensor, torch.Tensor):
        to = getattr(torch, target) if isinstance(target, str) else target
        return tensor.to(to) if tensor.dtype.is_floating_point else tensor
    if tensorflow is not None and tensorflow.is_tensor(tensor):
        to = tensorflow.as_dtype(target)
        return tensorflow.cast(tensor, to) if tensor.dtype.is_floating else tensor
    if hasattr(tensor, "astype"):
        to = numpy_dtype(target) if isinstance(target, str) else target
        return tensor.astype(to, copy=False) if is_floating(tensor) else tensor
    raise ArgumentTypeError(
        f"expected a numpy array, a torch tensor or a TensorFlow tensor, got {type(tensor).__name__}"
    )
