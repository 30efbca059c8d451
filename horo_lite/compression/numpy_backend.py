"""The operations of compression on host memory, by numpy.

numpy works in cache-sized blocks with reused scratch, since a fresh temporary of a bucket's size
costs more in page faults than the arithmetic on it.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from horo_lite.arrays import cast, numpy_dtype, type_name
from horo_lite.arrays.pool import shared_pool
from horo_lite.interfaces import Array

_BLOCK = 1 << 15  # float32 input, scratch and output together stay in a 512 KiB L2
_PRODUCT = 1 << 18  # elements of a matrix in one product: with each, BLAS packs the thin factor again
_SAMPLES = 1 << 14  # enough to place the k-th largest value within a few percent

quiet = np.errstate(all="ignore")
"""Decorator: overflow to infinity and NaN from infinity are results here, not accidents (see docs/compression.md)."""


class NumpyBackend:
    """Flat arrays in host memory."""

    xp: Any = np
    rint = staticmethod(np.rint)

    def blocks(self, elements: int) -> Iterator[slice]:
        """Cuts that stay in cache; each but the last a multiple of eight, so that packed codes end on a byte."""
        for start in range(0, elements, _BLOCK):
            yield slice(start, min(start + _BLOCK, elements))

    def scratch(self, like: Array) -> Array:
        """Room for one block in ``like``'s type."""
        return np.empty(min(len(like), _BLOCK), like.dtype)

    def empty(self, elements: int, name: str) -> Array:
        """A flat array of arbitrary content; large memory is used again, since fresh pages cost as much as a copy."""
        return shared_pool.empty(elements, numpy_dtype(name))

    def zeros(self, elements: int, name: str) -> Array:
        out = self.empty(elements, name)
        out.fill(0)
        return out

    def view(self, array: Array, name: str) -> Array:
        """The same memory as another type."""
        return array.view(numpy_dtype(name))

    @quiet
    def convert(self, array: Array, name: str) -> Array:
        """``array`` in the type ``name``: itself where it has it, else a copy rounded to nearest even."""
        if array.dtype == numpy_dtype(name):
            return array
        out = self.empty(len(array), name)
        if {name, array.dtype.name} in ({"float16", "float32"}, {"bfloat16", "float32"}):
            cast(out, array)
        else:
            np.copyto(out, array, casting="unsafe")
        return out

    def assign(self, out: Array, source: Array) -> None:
        """out[:] = source, whatever their types; floats are truncated toward zero on the way to integers."""
        np.copyto(out, source, casting="unsafe")

    def copy(self, array: Array) -> Array:
        """The same values in memory of their own."""
        return array.copy()

    def join(self, arrays: Sequence[Array]) -> Array:
        """The arrays one after another: a view where they lie so in memory, else a copy. Not to be written to."""
        if len(arrays) == 1:
            return arrays[0]
        if _lie_adjacent(arrays):
            return _adjacent(arrays)
        out = self.empty(sum(map(len, arrays)), type_name(arrays[0]))
        return np.concatenate(arrays, out=out)

    def generator(self, *words: int) -> np.random.Generator:
        """Random numbers that depend on the words alone."""
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence(words)))

    def uniform(self, generator: np.random.Generator, out: Array) -> Array:
        """Fill ``out`` from the open interval (0, 1) in steps of 2**-16, which is what one rounding decision needs."""
        words = generator.integers(0, 1 << 64, -(-len(out) // 4), dtype=np.uint64)
        np.copyto(out, words.view(np.uint16)[: len(out)])
        out += 0.5
        out *= 1.0 / (1 << 16)
        return out

    def random_bits(self, generator: np.random.Generator, elements: int, bits: int) -> Array:
        """int32 numbers of ``bits`` random bits."""
        words = generator.integers(0, 1 << 64, -(-elements // 2), dtype=np.uint64)
        return words.view(np.int32)[:elements] & ((1 << bits) - 1)

    def pack_bits(self, bits: Array) -> Array:
        """Eight booleans to a byte, the first in the lowest bit."""
        return np.packbits(bits, bitorder="little")

    def take(self, table: np.ndarray, codes: Array) -> Array:
        """Row ``codes[i]`` of a small table of constants for each i."""
        return np.take(table, codes, axis=0, mode="clip")

    def encode_float8(self, codes: Array, values: Array) -> None:
        """Write floats of at most 448 as bytes of e4m3, rounded to nearest even.

        By a table over the upper half of a float32, whose last bit says whether anything follows: four times as fast
        as ml_dtypes, with the same result.
        """
        halves = self.convert(values, "float32").view(np.uint16)
        low, high = (0, 1) if sys.byteorder == "little" else (1, 0)
        codes[:] = _float8_codes()[halves[high::2] | (halves[low::2] != 0)]

    def stack(self, scalars: Sequence[Any], name: str) -> Array:
        """0-d values as a flat array."""
        return np.array(scalars, dtype=numpy_dtype(name))

    def peak(self, array: Array) -> Any:
        """max(abs(array)); NaN where there is one."""
        return np.maximum(array.max(), -array.min())

    @quiet
    def mean_abs(self, array: Array) -> Any:
        """sum(abs(array)) / n."""
        scratch = self.scratch(array)
        total = 0.0
        for cut in self.blocks(len(array)):
            block = array[cut]
            total += float(np.abs(block, out=scratch[: len(block)]).sum())
        if math.isinf(total) and np.isfinite(peak := self.peak(array)):
            return peak * self.mean_abs(array / peak)
        return array.dtype.type(total / len(array))

    @quiet
    def norm(self, array: Array) -> Any:
        """The Euclidean norm, or the type's largest number where a finite array's norm is beyond it."""
        total = sum(float(np.dot(array[cut], array[cut])) for cut in self.blocks(len(array)))
        if math.isinf(total) and np.isfinite(peak := self.peak(array)):
            return np.minimum(peak * self.norm(array / peak), np.finfo(array.dtype).max)
        return array.dtype.type(np.sqrt(total))

    @quiet
    def finite(self, array: Array) -> bool:
        """Neither infinity nor NaN anywhere. A finite sum proves it; finite values may still overflow their sum."""
        return bool(np.isfinite(array.sum())) or bool(np.isfinite(array).all())

    def largest(self, array: Array, count: int) -> Array:
        """Ascending indices of exactly ``count`` elements of largest magnitude; NaN counts as the largest.

        A threshold from a sample leaves a few candidates to choose from exactly; where it was too high, all are.
        """
        magnitude = np.abs(array)
        elements = len(array)
        candidates = None
        if elements >= 4 * _SAMPLES and 16 * count <= elements:
            sample = magnitude[:: elements // _SAMPLES]
            keep = min(len(sample) - 1, int(1.25 * count / elements * len(sample)) + 16)
            threshold = np.partition(sample, len(sample) - keep)[len(sample) - keep]
            candidates = np.flatnonzero(~(magnitude < threshold))
            if len(candidates) < count:
                candidates = None
        pool = magnitude if candidates is None else magnitude[candidates]
        chosen = np.argpartition(pool, len(pool) - count)[len(pool) - count :]
        return np.sort(chosen if candidates is None else candidates[chosen])

    def where_true(self, condition: Array) -> Array:
        """Indices at which a flat boolean array is true."""
        return np.flatnonzero(condition)

    def indices(self, values: np.ndarray) -> Array:
        """Indices computed on the host, for use with this backend's arrays."""
        return values

    def to_host(self, array: Array) -> np.ndarray:
        """A few values for the host to look at."""
        return array

    def orthonormal(self, matrix: Array) -> Array:
        """A basis of the columns by Householder QR: orthonormal even where they are dependent or zero."""
        if not np.isfinite(matrix).all():
            return np.full_like(matrix, np.nan)
        return np.linalg.qr(matrix)[0]

    def product(self, out: Array, left: Array, right: Array) -> None:
        """out = left @ right for thin factors, by blocks of rows: the library passes over its result twice."""
        for rows in _rows(out, _PRODUCT):
            np.matmul(left[rows], right, out=out[rows])

    @quiet
    def product_of_sum(self, out: Array, a: Array, b: Array, right: Array) -> Array:
        """out = a + b; returns out @ right for a thin factor, multiplied while the sum is in cache."""
        right = np.ascontiguousarray(right)
        product = np.empty((len(out), right.shape[1]), out.dtype)
        for rows in _rows(out, _PRODUCT):
            np.add(a[rows], b[rows], out=out[rows])
            np.matmul(out[rows], right, out=product[rows])
        return product

    def subtract_product(self, out: Array, left: Array, right: Array) -> None:
        """out -= left @ right, without the product in memory."""
        scratch: Array = None
        for rows in _rows(out, _PRODUCT // 4):  # scratch and block together stay in cache
            if scratch is None:
                scratch = np.empty_like(out[rows])
            part = np.matmul(left[rows], right, out=scratch[: rows.stop - rows.start])
            np.subtract(out[rows], part, out=out[rows])

    def normal(self, generator: np.random.Generator, elements: int, name: str) -> Array:
        """Standard normal numbers."""
        return generator.standard_normal(elements).astype(numpy_dtype(name))


@functools.cache
@quiet
def _float8_codes() -> np.ndarray[Any, Any]:
    """The byte of e4m3 for every upper half of a float32."""
    import ml_dtypes

    values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    return values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def _rows(matrix: np.ndarray, elements: int) -> Iterator[slice]:
    """Blocks of so many elements of a matrix."""
    step = max(1, elements // matrix.shape[1])
    for start in range(0, len(matrix), step):
        yield slice(start, min(start + step, len(matrix)))


def _lie_adjacent(arrays: Sequence[np.ndarray]) -> bool:
    base = arrays[0].base
    return base is not None and all(
        b.base is base and a.ctypes.data + a.nbytes == b.ctypes.data
        for a, b in itertools.pairwise(arrays)
    )


def _adjacent(arrays: Sequence[np.ndarray]) -> np.ndarray:
    elements = sum(len(a) for a in arrays)
    return np.lib.stride_tricks.as_strided(
        arrays[0], (elements,), arrays[0].strides, writeable=False
    )
