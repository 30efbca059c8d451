"""Elementwise work in host memory, by numpy.

A block has 32 Ki elements (128 KiB of float32), so that accumulator, input and scratch share an L2
of 512 KiB.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from horo_lite.arrays.casts import cast
from horo_lite.arrays.pool import shared_pool
from horo_lite.arrays.types import numpy_dtype
from horo_lite.interfaces import Array, Reduction

_DOT_ELEMENTS = 1 << 13  # OpenBLAS starts threads above 10,000

_OPERATIONS = {
    Reduction.SUM: np.add,
    Reduction.AVERAGE: np.add,
    Reduction.MIN: np.minimum,
    Reduction.MAX: np.maximum,
    Reduction.PRODUCT: np.multiply,
    Reduction.ADASUM: np.add,
}
_BOOL_OPERATIONS = {
    Reduction.SUM: np.logical_or,
    Reduction.MAX: np.logical_or,
    Reduction.PRODUCT: np.logical_and,
    Reduction.MIN: np.logical_and,
}


class _Blocks(threading.local):
    """The scratch of one thread, a block per slot and type."""

    def __init__(self) -> None:
        self.by_slot: dict[tuple[int, str], Array] = {}


class NumpyBackend:
    """See ``backend.Backend``."""

    block_elements = 1 << 15  # measured flat from 16 Ki to 128 Ki; torch casts it without threads

    def __init__(self) -> None:
        self._blocks = _Blocks()

    def empty(self, name: str, elements: int) -> Array:
        return shared_pool.empty(elements, numpy_dtype(name))

    def scratch(self, slot: int, name: str, elements: int) -> Array:
        block = self._blocks.by_slot.get((slot, name))
        if block is None or len(block) < elements:
            block = np.empty(max(elements, self.block_elements), numpy_dtype(name))
            self._blocks.by_slot[slot, name] = block
        return block[:elements]

    def copy(self, out: Array, source: Array) -> None:
        if out.dtype is source.dtype:
            np.copyto(out, source)
        else:
            cast(out, source)

    def operation(self, name: str, reduction: Reduction) -> Callable[..., Any]:
        return (_BOOL_OPERATIONS if name == "bool" else _OPERATIONS)[reduction]

    def multiplier(self, name: str, factor: float) -> Callable[[Array], Any]:
        return _in_place(np.multiply, name, factor)

    def divider(self, name: str, divisor: int) -> Callable[[Array], Any]:
        # By a power of two the product is the same number and faster.
        if divisor & (divisor - 1):
            return _in_place(np.divide, name, divisor)
        return _in_place(np.multiply, name, 1.0 / divisor)

    def floor_divide(self, out: Array, array: Array, divisor: int) -> None:
        np.floor_divide(array, divisor, out=out)

    def truncating_divide(self, array: Array, divisor: int) -> None:
        # numpy rounds down; N - 1 more on negative values turns that into toward zero.
        raised = self.scratch(7, "int64", len(array))
        np.right_shift(array, 63, out=raised)
        np.bitwise_and(raised, divisor - 1, out=raised)
        np.add(array, raised, out=array)
        np.floor_divide(array, divisor, out=array)

    def truncate(self, out: Array, values: Array) -> None:
        lowest, highest = float_limits(np.iinfo(out.dtype))
        np.clip(values, lowest, highest, out=values)
        np.copyto(out, values, casting="unsafe")

    def dot(self, a: Array, b: Array) -> float:
        return sum(
            float(np.dot(a[start : start + _DOT_ELEMENTS], b[start : start + _DOT_ELEMENTS]))
            for start in range(0, len(a), _DOT_ELEMENTS)
        )


def float_limits(limits: Any) -> tuple[float, float]:
    """The least and the greatest float64 that an integer type (its ``iinfo``) can hold."""
    highest = float(limits.max)
    if highest > limits.max:
        highest = float(np.nextafter(highest, 0.0))
    return float(limits.min), highest


def _in_place(ufunc: Any, name: str, operand: float) -> Callable[[Array], Any]:
    dtype = numpy_dtype(name)
    if dtype.kind != "c":
        value = np.array(operand, dtype)  # 0-d: a Python number would be converted at each call
        return lambda block: ufunc(block, value, out=block)
    # As twice as many real numbers: a complex product would make NaN of inf.
    real = np.dtype(np.float32 if dtype.itemsize == 8 else np.float64)
    value = np.array(operand, real)

    def scale(block: Array) -> None:
        parts = block.view(real)
        ufunc(parts, value, out=parts)

    return scale
