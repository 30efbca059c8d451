"""Elementwise work on torch tensors, for data that stays on its device.

Written for CUDA, where one launch should do much: blocks are large, and scratch comes from torch's
caching allocator, which gives the same memory every time. The same code runs on CPU tensors, which
is how it is tested without a GPU. Work is queued on the current stream; whoever hands the result to
MPI synchronises it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from horo_lite.arrays.numpy_backend import float_limits
from horo_lite.arrays.types import checked
from horo_lite.interfaces import Array, Reduction


class TorchBackend:
    """See ``backend.Backend``; torch must be loaded.

    Args:
        device: torch's name of the tensors' device.
    """

    block_elements = 1 << 24

    def __init__(self, device: str) -> None:
        self._torch: Any = sys.modules["torch"]
        self._device = device

    def empty(self, name: str, elements: int) -> Array:
        dtype = getattr(self._torch, checked(name))
        return self._torch.empty(elements, dtype=dtype, device=self._device)

    def scratch(self, slot: int, name: str, elements: int) -> Array:
        return self.empty(name, elements)

    def copy(self, out: Array, source: Array) -> None:
        out.copy_(source)

    def operation(self, name: str, reduction: Reduction) -> Callable[..., Any]:
        torch = self._torch
        if name == "bool":
            either = reduction in (Reduction.SUM, Reduction.MAX)
            return torch.logical_or if either else torch.logical_and  # type: ignore[no-any-return]
        operation = {
            Reduction.MIN: torch.minimum,
            Reduction.MAX: torch.maximum,
            Reduction.PRODUCT: torch.mul,
        }.get(reduction, torch.add)
        if name != "uint16":
            return operation  # type: ignore[no-any-return]

        def through_int32(a: Array, b: Array, out: Array) -> None:
            # torch has the type, but no arithmetic on it.
            out.copy_(operation(a.to(torch.int32), b.to(torch.int32)))

        return through_int32

    def multiplier(self, name: str, factor: float) -> Callable[[Array], Any]:
        return lambda block: self._real(block).mul_(factor)

    def divider(self, name: str, divisor: int) -> Callable[[Array], Any]:
        # On the device: by a Python number CUDA multiplies with the reciprocal instead, which
        # does not give N equal values back.
        real = {"complex64": "float32", "complex128": "float64"}.get(name, name)
        value = self._torch.full((), divisor, dtype=getattr(self._torch, real), device=self._device)
        return lambda block: self._real(block).div_(value)

    def floor_divide(self, out: Array, array: Array, divisor: int) -> None:
        self._torch.div(array, divisor, rounding_mode="floor", out=out)

    def truncating_divide(self, array: Array, divisor: int) -> None:
        array.div_(divisor, rounding_mode="trunc")

    def truncate(self, out: Array, values: Array) -> None:
        lowest, highest = float_limits(self._torch.iinfo(out.dtype))
        out.copy_(values.clamp_(lowest, highest))

    def dot(self, a: Array, b: Array) -> float:
        return float(self._torch.dot(a, b))

    def _real(self, block: Array) -> Array:
        return self._torch.view_as_real(block) if block.is_complex() else block
