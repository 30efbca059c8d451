"""Arithmetic on flat numpy arrays: what a schedule calls to make several ranks' values one.

Third stage of the data path: the reduction that is passed into a collective. Everything is done in blocks that stay in
a core's L2 cache, so adding, scaling and casting cost one pass over memory; scratch blocks are kept per thread, so no
call allocates.

Rules, the same for every array type:

- 16-bit floats are added and multiplied in float32 and rounded once (``wide``); their minimum and maximum are exact.
- An integer Average is taken of the exact sum and truncated toward zero (``wide``): it never wraps. Sum and Product
  wrap as the type does.
- An integer times a pre- or postscale factor is computed in float64, truncated toward zero and held to the type's range
  (Horovod's rule, which leaves the last point to the processor). Beyond 2**53 an int64 loses its low bits there.
- bool: Sum and Max are "or", Product and Min are "and".
- complex: Sum and Average.
- A NaN in any input of Min or Max is the result.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from horo_lite.arrays.casts import cast
from horo_lite.arrays.pool import shared_pool
from horo_lite.arrays.types import COMPLEX, FLOATS, HALVES, INTEGERS, checked, numpy_dtype
from horo_lite.errors import ArgumentError, ArgumentTypeError
from horo_lite.interfaces import Array, Reduction

BLOCK_ELEMENTS = 1 << 15
"""Elements of one block: 128 KiB of float32, so that accumulator, input and scratch share an L2 of 512 KiB."""

_DOT_ELEMENTS = 1 << 13  # OpenBLAS starts threads above 10,000 elements

_UFUNCS = {
    Reduction.SUM: np.add,
    Reduction.AVERAGE: np.add,
    Reduction.MIN: np.minimum,
    Reduction.MAX: np.maximum,
    Reduction.PRODUCT: np.multiply,
}
_BOOL_UFUNCS = {
    Reduction.SUM: np.logical_or,
    Reduction.MAX: np.logical_or,
    Reduction.PRODUCT: np.logical_and,
    Reduction.MIN: np.logical_and,
}


def check_supported(name: str, reduction: Reduction, prescale: float, postscale: float) -> None:
    """Raise where the type ``name`` can't be reduced that way, on whatever device.

    Raises:
        ArgumentTypeError: names the type, the operation and what is possible.
    """
    checked(name)
    operation = reduction.name.capitalize()
    if name == "bool":
        if reduction not in _BOOL_UFUNCS:
            raise ArgumentTypeError(
                f"{operation} of bool has no meaning; use Sum, Max (or), Min, Product (and)"
            )
        if prescale != 1.0 or postscale != 1.0:
            raise ArgumentTypeError(
                f"{operation} of bool takes no scale factors, got {prescale} and {postscale}"
            )
    elif name in COMPLEX and reduction not in (Reduction.SUM, Reduction.AVERAGE):
        raise ArgumentTypeError(
            f"{operation} of {name} is not supported; complex types have Sum and Average"
        )
    elif name in INTEGERS and reduction is Reduction.ADASUM:
        raise ArgumentTypeError(
            f"Adasum of {name} is not supported; it needs a floating-point type"
        )


@functools.lru_cache(maxsize=1024)
def numpy_kernel(
    name: str, reduction: Reduction, size: int, prescale: float, postscale: float
) -> NumpyKernel:
    """The kernel for host memory; kernels hold no state of a call, so one serves every thread."""
    check_supported(name, reduction, prescale, postscale)
    if name in INTEGERS and reduction is Reduction.AVERAGE:
        kind: type[NumpyKernel] = LongAverage if name == "int64" else IntegerAverage
    elif name in INTEGERS:
        kind = IntegerKernel
    elif name in HALVES:
        kind = HalfKernel
    else:
        kind = NumpyKernel
    return kind(name, reduction, size, prescale, postscale)


class _Scratch(threading.local):
    """Blocks of this thread, one per (slot, type); what is in them is lost at the next instruction."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, Any], Array] = {}

    def block(self, slot: int, dtype: Any, elements: int) -> Array:
        block = self._blocks.get((slot, dtype))
        if block is None:
            block = self._blocks[slot, dtype] = np.empty(BLOCK_ELEMENTS, dtype)
        return block[:elements]


_scratch = _Scratch()


def _blocks(elements: int) -> Iterator[slice]:
    for start in range(0, elements, BLOCK_ELEMENTS):
        yield slice(start, min(start + BLOCK_ELEMENTS, elements))


class NumpyKernel:
    """float32, float64, complex and bool; base of the others. ``interfaces.Kernel`` is the contract.

    Args:
        name: the element type.
        reduction: what ``combine`` does.
        size: the number of ranks, which Average divides by.
        prescale: factor of every input.
        postscale: factor of the result.
    """

    wide = False

    def __init__(
        self, name: str, reduction: Reduction, size: int, prescale: float, postscale: float
    ) -> None:
        if size < 1:
            raise ArgumentError(f"a reduction is over at least one rank, got size {size}")
        self.name = name
        self.reduction = reduction
        self.dtype = numpy_dtype(name)
        self._size = size
        self._prescale = prescale
        self._postscale = postscale
        self._averages = reduction is Reduction.AVERAGE and size > 1
        self._scales = self._averages or postscale != 1.0
        self._ufunc = _BOOL_UFUNCS[reduction] if name == "bool" else _UFUNCS.get(reduction, np.add)

    def empty(self, elements: int) -> Array:
        return shared_pool.empty(elements, self.dtype)

    def copy(self, out: Array, source: Array) -> None:
        np.copyto(out, source)

    @property
    def prescales(self) -> bool:
        """True where every rank must call ``prescale`` on its input before the schedule starts."""
        return self._prescale != 1.0 and not self.wide

    def prescale(self, buffer: Array) -> None:
        """Multiply this rank's input by the prescale factor, in place. A wide kernel does it while it combines."""
        if self.prescales:
            with np.errstate(all="ignore"):
                for block in _blocks(len(buffer)):
                    self._multiply(buffer[block], self._prescale)

    def combine(self, out: Array, inputs: Sequence[Array], last: bool = False) -> None:
        if self.reduction is Reduction.ADASUM and len(inputs) > 1:
            raise ArgumentError("Adasum is not elementwise: its schedule uses inner() and blend()")
        scales = last and self._scales
        with np.errstate(all="ignore"):  # inf - inf is a result, not news
            if len(inputs) == 2 and not scales:
                self._ufunc(inputs[0], inputs[1], out=out)
            elif len(inputs) == 1 and not scales:
                np.copyto(out, inputs[0])
            else:
                self._combine_blocks(out, inputs, scales)

    def _combine_blocks(self, out: Array, inputs: Sequence[Array], scales: bool) -> None:
        # The order of the inputs is kept, so a result that is also a late input must not be written before its turn.
        apart = any(np.may_share_memory(out, late) for late in inputs[2:])
        for block in _blocks(len(out)):
            result = out[block]
            if len(inputs) == 1:
                np.copyto(result, inputs[0][block])
            elif len(inputs) == 2:
                self._ufunc(inputs[0][block], inputs[1][block], out=result)
            else:
                partial = _scratch.block(0, self.dtype, len(result)) if apart else result
                self._ufunc(inputs[0][block], inputs[1][block], out=partial)
                for array in inputs[2:-1]:
                    self._ufunc(partial, array[block], out=partial)
                self._ufunc(partial, inputs[-1][block], out=result)
            if scales:
                self._finish(result)

    def _finish(self, block: Array) -> None:
        """Average and postscale of a block of combined values, in place."""
        if self._averages and self._postscale == 1.0:
            self._divide(block)
        else:
            self._multiply(
                block, self._postscale / self._size if self._averages else self._postscale
            )

    def _divide(self, block: Array) -> None:
        # A true division gives back N equal values exactly, which times 1/N does not; for a power of two both do, and
        # the product is faster.
        real = _real(block)
        if self._size & (self._size - 1):
            np.divide(real, real.dtype.type(self._size), out=real)
        else:
            np.multiply(real, real.dtype.type(1.0 / self._size), out=real)

    def _multiply(self, block: Array, factor: float) -> None:
        real = _real(block)
        np.multiply(real, real.dtype.type(factor), out=real)

    def inner(self, a: Array, b: Array) -> float:
        self._need_float("inner")
        total = 0.0
        with np.errstate(all="ignore"):
            for start in range(0, len(a), _DOT_ELEMENTS):
                left, right = a[start : start + _DOT_ELEMENTS], b[start : start + _DOT_ELEMENTS]
                wide_left = _scratch.block(0, np.float64, len(left))
                wide_right = _scratch.block(1, np.float64, len(left))
                np.copyto(wide_left, left)
                np.copyto(wide_right, right)
                total += float(np.dot(wide_left, wide_right))
        return total

    def blend(self, out: Array, a: Array, a_factor: float, b: Array, b_factor: float) -> None:
        self._need_float("blend")
        with np.errstate(all="ignore"):
            for block in _blocks(len(out)):
                left = _scratch.block(0, self.dtype, len(out[block]))
                right = _scratch.block(1, self.dtype, len(left))
                np.multiply(a[block], self.dtype.type(a_factor), out=left)
                np.multiply(b[block], self.dtype.type(b_factor), out=right)
                np.add(left, right, out=out[block])

    def _need_float(self, method: str) -> None:
        if self.name not in FLOATS:
            raise ArgumentTypeError(
                f"{method}() of {self.name} is not supported; it needs a floating-point type"
            )


class HalfKernel(NumpyKernel):
    """float16 and bfloat16: computed in float32, rounded exactly once."""

    def __init__(
        self, name: str, reduction: Reduction, size: int, prescale: float, postscale: float
    ) -> None:
        super().__init__(name, reduction, size, prescale, postscale)
        self.wide = reduction in (Reduction.SUM, Reduction.AVERAGE, Reduction.PRODUCT)

    def _widen(self, source: Array, slot: int) -> Array:
        block = _scratch.block(slot, np.float32, len(source))
        cast(block, source)
        return block

    def prescale(self, buffer: Array) -> None:
        if self.prescales:
            with np.errstate(all="ignore"):
                for block in _blocks(len(buffer)):
                    values = self._widen(buffer[block], 0)
                    self._multiply(values, self._prescale)
                    cast(buffer[block], values)

    def combine(self, out: Array, inputs: Sequence[Array], last: bool = False) -> None:
        if self.reduction is Reduction.ADASUM and len(inputs) > 1:
            raise ArgumentError("Adasum is not elementwise: its schedule uses inner() and blend()")
        scales_inputs = self.wide and self._prescale != 1.0
        with np.errstate(all="ignore"):
            for block in _blocks(len(out)):
                total = self._widen(inputs[0][block], 0)
                if scales_inputs:
                    self._multiply(total, self._prescale)
                for array in inputs[1:]:
                    values = self._widen(array[block], 1)
                    if scales_inputs:
                        self._multiply(values, self._prescale)
                    self._ufunc(total, values, out=total)
                if last and self._scales:
                    self._finish(total)
                cast(out[block], total)

    def blend(self, out: Array, a: Array, a_factor: float, b: Array, b_factor: float) -> None:
        with np.errstate(all="ignore"):
            for block in _blocks(len(out)):
                left, right = self._widen(a[block], 0), self._widen(b[block], 1)
                self._multiply(left, a_factor)
                self._multiply(right, b_factor)
                np.add(left, right, out=left)
                cast(out[block], left)


class IntegerKernel(NumpyKernel):
    """Integers under anything but Average: they wrap as the type does, and scale in float64."""

    def _multiply(self, block: Array, factor: float) -> None:
        scaled = _scratch.block(2, np.float64, len(block))
        np.multiply(block, factor, out=scaled)
        _truncate(block, scaled)


class IntegerAverage(IntegerKernel):
    """Average of integers of up to 32 bits: the exact sum in int64, divided once."""

    wide = True

    def combine(self, out: Array, inputs: Sequence[Array], last: bool = False) -> None:
        for block in _blocks(len(out)):
            total = _scratch.block(0, np.int64, len(out[block]))
            np.copyto(total, self._prescaled(inputs[0][block]))
            for array in inputs[1:]:
                np.add(total, self._prescaled(array[block]), out=total)
            if last:
                self._average(out[block], total)
            else:
                np.copyto(out[block], total, casting="unsafe")

    def _prescaled(self, block: Array) -> Array:
        if self._prescale == 1.0:
            return block
        scaled = _scratch.block(1, self.dtype, len(block))
        np.copyto(scaled, block)
        self._multiply(scaled, self._prescale)
        return scaled

    def _average(self, out: Array, total: Array) -> None:
        if self._postscale != 1.0:
            scaled = _scratch.block(2, np.float64, len(total))
            np.multiply(total, self._postscale, out=scaled)
            np.divide(scaled, self._size, out=scaled)
            _truncate(out, scaled)
            return
        # numpy divides toward minus infinity: adding N - 1 to negative sums turns that into toward zero.
        raised = _scratch.block(1, np.int64, len(total))
        np.right_shift(total, 63, out=raised)
        np.bitwise_and(raised, self._size - 1, out=raised)
        np.add(total, raised, out=total)
        np.floor_divide(total, self._size, out=total)
        np.copyto(out, total, casting="unsafe")


class LongAverage(IntegerAverage):
    """Average of int64, for which no wider type exists: quotients and remainders are summed apart.

    With x = N q + r and 0 <= r < N, the average is sum(q) + sum(r) / N, where sum(r) is small and sum(q) differs from
    the average by less than N: it may wrap on the way, and wraps back.
    """

    def combine(self, out: Array, inputs: Sequence[Array], last: bool = False) -> None:
        for block in _blocks(len(out)):
            elements = len(out[block])
            quotients = _scratch.block(0, np.int64, elements)
            remainders = _scratch.block(3, np.int64, elements)
            part = _scratch.block(4, np.int64, elements)
            rest = _scratch.block(5, np.int64, elements)
            quotients[:] = 0
            remainders[:] = 0
            for array in inputs:
                np.divmod(self._prescaled(array[block]), self._size, out=(part, rest))
                np.add(quotients, part, out=quotients)
                np.add(remainders, rest, out=remainders)
            if last and self._postscale != 1.0:
                self._scaled_average(out[block], quotients, remainders)
                continue
            if not last:
                np.multiply(quotients, self._size, out=quotients)
                np.add(quotients, remainders, out=out[block])
                continue
            np.divmod(remainders, self._size, out=(part, rest))
            np.add(quotients, part, out=quotients)
            upward = (quotients < 0) & (rest > 0)
            np.add(quotients, upward, out=out[block])

    def _scaled_average(self, out: Array, quotients: Array, remainders: Array) -> None:
        scaled = _scratch.block(2, np.float64, len(out))
        np.multiply(quotients, float(self._size), out=scaled)
        np.add(scaled, remainders, out=scaled)
        np.multiply(scaled, self._postscale, out=scaled)
        np.divide(scaled, self._size, out=scaled)
        _truncate(out, scaled)


def _real(block: Array) -> Array:
    """Complex numbers as twice as many real ones: a complex product would make NaN of inf."""
    if block.dtype.kind != "c":
        return block
    return block.view(np.float32 if block.dtype.itemsize == 8 else np.float64)


def _truncate(out: Array, values: Array) -> None:
    """float64 to an integer type, toward zero, held to its range; what C leaves undefined must not differ by rank."""
    limits = np.iinfo(out.dtype)
    highest = float(limits.max)
    if highest > limits.max:
        highest = np.nextafter(highest, 0.0)
    np.clip(values, float(limits.min), highest, out=values)
    np.copyto(out, values, casting="unsafe")
