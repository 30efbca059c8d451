"""The arithmetic that schedules are tested with: as plain as can be, so that it is right by
inspection."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from horo_lite.interfaces import Array

UFUNC = {
    "sum": np.add,
    "average": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}


class ReferenceKernel:
    """A numpy kernel for one reduction; wide types are accumulated in float32 (or int64) and
    rounded once."""

    def __init__(
        self,
        dtype: np.typing.DTypeLike = np.float64,
        reduction: str = "sum",
        size: int = 1,
        *,
        wide: bool | None = None,
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.wide = self.dtype.itemsize == 2 if wide is None else wide
        self._ufunc = UFUNC[reduction]
        self._scale = 1.0 / size if reduction == "average" else 1.0

    def empty(self, elements: int) -> Array:
        return np.full(elements, 77, self.dtype)  # a value that would be noticed

    def copy(self, out: Array, source: Array) -> None:
        out[:] = source

    def combine(self, out: Array, inputs: Sequence[Array], last: bool = False) -> None:
        if self.wide and not last:
            raise RuntimeError("a wide kernel's partial results must not travel")
        accumulator = inputs[0].astype(np.float32) if self.wide else inputs[0].copy()
        for array in inputs[1:]:
            accumulator = self._ufunc(accumulator, array)
        out[:] = accumulator * self._scale if last and self._scale != 1.0 else accumulator

    def inner(self, a: Array, b: Array) -> float:
        return float(np.dot(a.astype(np.float64), b.astype(np.float64)))

    def blend(self, out: Array, a: Array, a_factor: float, b: Array, b_factor: float) -> None:
        out[:] = a_factor * a + b_factor * b
