"""The few array operations that compression is written in, for numpy and for torch.

Every method's formula exists once: it calls these primitives and, through ``xp``, the functions
that numpy and torch have under one name (abs, floor, where, ...). torch is found through
``sys.modules``: who passes a tensor has imported it. Nothing here moves a tensor off its device.

numpy works in cache-sized blocks with reused scratch, since a fresh temporary of a bucket's size
costs more in page faults than the arithmetic on it; a device takes an array whole (one launch each).
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from horo_lite.arrays import cast, is_torch, numpy_dtype, type_name
from horo_lite.arrays.pool import shared_pool
from horo_lite.arrays.types import FLOATS
from horo_lite.interfaces import Array

_NUMPY_BLOCK = 1 << 15  # float32 input, scratch and output together stay in a 512 KiB L2
_NUMPY_ROWS = 1 << 18  # elements of a matrix in one product, with which BLAS packs the thin factor again
_SAMPLES = 1 << 14  # enough to place the k-th largest value within a few percent

quiet = np.errstate(all="ignore")
"""Decorator: overflow to infinity and NaN from infinity are results here, not accidents (see docs/compression.md)."""


class NumpyBackend:
    """Flat arrays in host memory."""

    xp: Any = np
    rint = staticmethod(np.rint)

    def blocks(self, elements: int) -> Iterator[slice]:
        """Cuts that stay in cache; each but the last a multiple of eight, so that packed codes end on a byte."""
        for start in range(0, elements, _NUMPY_BLOCK):
            yield slice(start, min(start + _NUMPY_BLOCK, elements))

    def scratch(self, like: Array) -> Array:
        """Room for one block in ``like``'s type."""
        return np.empty(min(len(like), _NUMPY_BLOCK), like.dtype)

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
        for rows in _rows(out, _NUMPY_ROWS):
            np.matmul(left[rows], right, out=out[rows])

    @quiet
    def product_of_sum(self, out: Array, a: Array, b: Array, right: Array) -> Array:
        """out = a + b; returns out @ right for a thin factor, multiplied while the sum is in cache."""
        right = np.ascontiguousarray(right)
        product = np.empty((len(out), right.shape[1]), out.dtype)
        for rows in _rows(out, _NUMPY_ROWS):
            np.add(a[rows], b[rows], out=out[rows])
            np.matmul(out[rows], right, out=product[rows])
        return product

    def subtract_product(self, out: Array, left: Array, right: Array) -> None:
        """out -= left @ right, without the product in memory."""
        scratch: Array = None
        for rows in _rows(out, _NUMPY_ROWS // 4):  # scratch and block together stay in cache
            if scratch is None:
                scratch = np.empty_like(out[rows])
            part = np.matmul(left[rows], right, out=scratch[: rows.stop - rows.start])
            np.subtract(out[rows], part, out=out[rows])

    def normal(self, generator: np.random.Generator, elements: int, name: str) -> Array:
        """Standard normal numbers."""
        return generator.standard_normal(elements).astype(numpy_dtype(name))


class TorchBackend:
    """Flat torch tensors of one device. Operation by operation the same as ``NumpyBackend``."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.xp: Any = sys.modules["torch"]
        self.rint = self.xp.round

    def blocks(self, elements: int) -> Iterator[slice]:
        if elements:
            yield slice(0, elements)

    def scratch(self, like: Array) -> Array:
        return self.xp.empty_like(like)

    def empty(self, elements: int, name: str) -> Array:
        return self.xp.empty(elements, dtype=getattr(self.xp, name), device=self.device)

    def zeros(self, elements: int, name: str) -> Array:
        return self.xp.zeros(elements, dtype=getattr(self.xp, name), device=self.device)

    def view(self, array: Array, name: str) -> Array:
        kind = getattr(self.xp, name)
        if array.storage_offset() * array.itemsize % kind.itemsize:
            array = (
                array.clone()
            )  # a received payload that starts at an odd byte; torch views aligned memory only
        return array.view(kind)

    def convert(self, array: Array, name: str) -> Array:
        return array.to(getattr(self.xp, name))

    def assign(self, out: Array, source: Array) -> None:
        out.copy_(source)

    def copy(self, array: Array) -> Array:
        return array.clone()

    def join(self, arrays: Sequence[Array]) -> Array:
        return arrays[0] if len(arrays) == 1 else self.xp.cat(list(arrays))

    def generator(self, *words: int) -> Any:
        seed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) >> 1
        return self.xp.Generator(self.device).manual_seed(seed)

    def uniform(self, generator: Any, out: Array) -> Array:
        return out.uniform_(generator=generator)

    def random_bits(self, generator: Any, elements: int, bits: int) -> Array:
        out = self.empty(elements, "int32")
        return out.random_(0, 1 << bits, generator=generator)

    def pack_bits(self, bits: Array) -> Array:
        padding = -len(bits) % 8
        padded = self.xp.nn.functional.pad(bits.to(self.xp.uint8), (0, padding)).view(-1, 8)
        return (padded * self._constant(1 << np.arange(8), "uint8")).sum(1, dtype=self.xp.uint8)

    def take(self, table: np.ndarray, codes: Array) -> Array:
        return self._constant(table, table.dtype.name)[codes.to(self.xp.int64)]

    def encode_float8(self, codes: Array, values: Array) -> None:
        codes.copy_(values.to(self.xp.float8_e4m3fn).view(self.xp.uint8))

    def stack(self, scalars: Sequence[Any], name: str) -> Array:
        kind = getattr(self.xp, name)
        return self.xp.stack(
            [self.xp.as_tensor(s, dtype=kind, device=self.device) for s in scalars]
        )

    def peak(self, array: Array) -> Any:
        return array.abs().max()

    def mean_abs(self, array: Array) -> Any:
        return array.abs().mean(dtype=self.xp.float64).to(array.dtype)

    def norm(self, array: Array) -> Any:
        norm = self.xp.linalg.vector_norm(array, dtype=self.xp.float64)
        largest = self.xp.finfo(array.dtype).max
        return self.xp.where(self.xp.isfinite(array.abs().max()), norm.clamp(max=largest), norm).to(array.dtype)

    def finite(self, array: Array) -> bool:
        return bool(self.xp.isfinite(array).all())

    def largest(self, array: Array, count: int) -> Array:
        return self.xp.topk(array.abs(), count, sorted=False).indices.sort().values

    def where_true(self, condition: Array) -> Array:
        return condition.nonzero().view(-1)

    def indices(self, values: np.ndarray) -> Array:
        return self.xp.from_numpy(values).to(self.device)

    def to_host(self, array: Array) -> np.ndarray:
        return array.cpu().numpy()

    def orthonormal(self, matrix: Array) -> Array:
        basis = self.xp.linalg.qr(self.xp.nan_to_num(matrix)).Q
        return self.xp.where(self.xp.isfinite(matrix).all(), basis, self.xp.nan)

    def product(self, out: Array, left: Array, right: Array) -> None:
        self.xp.matmul(left, right, out=out)

    def product_of_sum(self, out: Array, a: Array, b: Array, right: Array) -> Array:
        return self.xp.add(a, b, out=out) @ right

    def subtract_product(self, out: Array, left: Array, right: Array) -> None:
        out.addmm_(left, right, alpha=-1)

    def normal(self, generator: Any, elements: int, name: str) -> Array:
        return self.empty(elements, name).normal_(generator=generator)

    def _constant(self, values: np.ndarray, name: str) -> Array:
        return self.xp.as_tensor(values, device=self.device).to(getattr(self.xp, name))


Backend = NumpyBackend | TorchBackend

_NUMPY = NumpyBackend()


def backend_of(array: Array) -> Backend:
    """The operations for arrays such as this one."""
    return _torch_backend(array.device) if is_torch(array) else _NUMPY


@functools.cache
def _torch_backend(device: Any) -> TorchBackend:
    return TorchBackend(device)


def is_floating(array: Array) -> bool:
    """True for the types that compression applies to; others travel as they are."""
    return type_name(array) in FLOATS


def work_type(array: Array) -> str:
    """The type that a method computes in: the array's own, float32 for 16-bit floats."""
    name = type_name(array)
    return name if name == "float64" else "float32"


@functools.cache
def float8_values(name: str) -> np.ndarray[Any, Any]:
    """The value of each byte of e4m3, as floats of the type ``name``."""
    import ml_dtypes  # only the 8-bit float needs it

    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(name)


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
