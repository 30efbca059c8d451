"""Arithmetic on flat arrays: what a schedule calls to make several ranks' values one.

The reduction that is passed into a collective. The rules are written once, over a ``Backend`` that
does the elementwise work (numpy for host memory, torch for a device). Everything is done in blocks
that stay in a core's L2 cache, so adding, scaling and casting cost one pass over memory; scratch
blocks are kept, so no call allocates.

- 16-bit floats are added and multiplied in float32 and rounded once (``wide``); their minimum and
  maximum are exact.
- An integer Average is that of the exact sum, truncated toward zero (``wide``): it never wraps.
  Sum and Product wrap as the type does.
- An integer times a pre- or postscale factor is computed in float64, truncated toward zero and held
  to the type's range (Horovod's rule, which leaves the last point to the processor). Beyond 2**53
  an int64 loses its low bits there. A NaN factor is the caller's to refuse.
- bool: Sum and Max are "or", Product and Min are "and".
- complex: Sum and Average.
- A NaN in any input of Min or Max is the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from horo_lite.arrays.types import COMPLEX, FLOATS, HALVES, INTEGERS, checked
from horo_lite.errors import ArgumentError, ArgumentTypeError
from horo_lite.interfaces import Array, Kernel, Reduction

_AND_OR = (Reduction.SUM, Reduction.MAX, Reduction.PRODUCT, Reduction.MIN)

# inf - inf is a result, not news. As a decorator it costs half of what a with statement does.
_quiet: Callable[[Any], Any] = np.errstate(all="ignore")


class Backend(Protocol):
    """Elementwise work on flat arrays of one kind; ``name`` is always an element type's."""

    block_elements: int

    def empty(self, name: str, elements: int) -> Array:
        """An uninitialised array that the caller keeps."""
        ...

    def scratch(self, slot: int, name: str, elements: int) -> Array:
        """An uninitialised array of at most a block, valid until the same slot is asked again."""
        ...

    def copy(self, out: Array, source: Array) -> None:
        """out[:] = source, converted to out's type (a float's digits are rounded to even)."""
        ...

    def operation(self, name: str, reduction: Reduction) -> Callable[..., Any]:
        """``f(a, b, out=c)`` on arrays of one type; c may be a or b."""
        ...

    def multiplier(self, name: str, factor: float) -> Callable[[Array], Any]:
        """A function that multiplies a float or complex array by ``factor``, in place."""
        ...

    def divider(self, name: str, divisor: int) -> Callable[[Array], Any]:
        """A function that divides a float or complex array, correctly rounded, in place."""
        ...

    def floor_divide(self, out: Array, array: Array, divisor: int) -> None:
        """out[:] = array // divisor, for int64."""
        ...

    def truncating_divide(self, array: Array, divisor: int) -> None:
        """array[:] = array / divisor, toward zero, for int64."""
        ...

    def truncate(self, out: Array, values: Array) -> None:
        """out[:] = float64 values, toward zero and held to the range of out's integer type."""
        ...

    def dot(self, a: Array, b: Array) -> float:
        """The dot product of two float64 arrays of at most a block."""
        ...


class ArrayKernel(Kernel, Protocol):
    """A kernel as the engine sees it: schedules need no ``prescale``."""

    prescales: bool
    """True where ``prescale`` must be called; a wide kernel scales its inputs while it combines."""

    def prescale(self, buffer: Array) -> None:
        """Multiply a rank's own input by the prescale factor, in place, before its schedule starts.

        Does nothing where the factor is 1 or the kernel is wide.
        """
        ...

    def combine_block(self, out: Array, inputs: Sequence[Array], last: bool) -> None:
        """``combine`` for at most a block, where floating-point errors are ignored already."""
        ...


def check_supported(
    name: str, reduction: Reduction, prescale: float = 1.0, postscale: float = 1.0
) -> None:
    """Raise where the type ``name`` can't be reduced that way, on whatever device.

    Raises:
        ArgumentTypeError: names the type, the operation and what is possible.
    """
    checked(name)
    operation = reduction.name.capitalize()
    if name == "bool":
        if reduction not in _AND_OR:
            raise ArgumentTypeError(
                f"{operation} of bool has no meaning; use Sum or Max (or), Min or Product (and)"
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


def make_kernel(
    backend: Backend,
    name: str,
    reduction: Reduction,
    size: int,
    prescale: float,
    postscale: float,
) -> ArrayKernel:
    """The kernel for one type and reduction. It holds no state of a call: it serves any thread."""
    reduction = Reduction(reduction)
    check_supported(name, reduction, prescale, postscale)
    kind = BlockKernel
    if name in INTEGERS:
        kind = IntegerKernel
        if reduction is Reduction.AVERAGE:
            kind = LongAverage if name == "int64" else IntegerAverage
    elif name in HALVES:
        kind = HalfKernel
    return kind(backend, name, reduction, size, prescale, postscale)


class BlockKernel:
    """float32, float64, complex and bool: computed in their own type. Base of the others."""

    wide = False

    def __init__(
        self,
        backend: Backend,
        name: str,
        reduction: Reduction,
        size: int,
        prescale: float,
        postscale: float,
    ) -> None:
        if size < 1:
            raise ArgumentError(f"a reduction is over at least one rank, got size {size}")
        self.name = name
        self.reduction = reduction
        self._backend = backend
        self._size = size
        self._prescale_factor = prescale
        self._postscale_factor = postscale
        self._operation = backend.operation(name, reduction)
        self._prepare()
        self.prescales = prescale != 1.0 and not self.wide

    def _prepare(self) -> None:
        """What can be done once: the functions that scale a block."""
        self._prescale = self._multiplier(self._prescale_factor)
        self._finish = self._finisher(self.name)

    def _multiplier(self, factor: float) -> Callable[[Array], Any] | None:
        return None if factor == 1.0 else self._backend.multiplier(self.name, factor)

    def _finisher(self, computed_in: str) -> Callable[[Array], Any] | None:
        """Average and postscale as one function of a block, or None where there is neither."""
        averages = self.reduction is Reduction.AVERAGE and self._size > 1
        if averages and self._postscale_factor == 1.0:
            # A division gives N equal values back exactly, which times 1/N does not.
            return self._backend.divider(computed_in, self._size)
        factor = self._postscale_factor / self._size if averages else self._postscale_factor
        return None if factor == 1.0 else self._backend.multiplier(computed_in, factor)

    def empty(self, elements: int) -> Array:
        return self._backend.empty(self.name, elements)

    def copy(self, out: Array, source: Array) -> None:
        self._backend.copy(out, source)

    @_quiet
    def prescale(self, buffer: Array) -> None:
        if not self.prescales or self._prescale is None:
            return
        step = self._backend.block_elements
        for start in range(0, len(buffer), step):
            self._prescale(buffer[start : start + step])

    @_quiet
    def combine(self, out: Array, inputs: Sequence[Array], last: bool = False) -> None:
        if self.reduction is Reduction.ADASUM and len(inputs) > 1:
            raise ArgumentError("Adasum is not elementwise: its schedule uses inner and blend")
        step = self._backend.block_elements
        if len(out) <= step or self._is_one_pass(len(inputs), last):
            self.combine_block(out, inputs, last)
            return
        for start in range(0, len(out), step):
            block = slice(start, start + step)
            self.combine_block(out[block], [array[block] for array in inputs], last)

    def _is_one_pass(self, inputs: int, last: bool) -> bool:
        """True where a single operation does all, so that blocks would gain nothing."""
        return inputs <= 2 and not (last and self._finish)

    def combine_block(self, out: Array, inputs: Sequence[Array], last: bool) -> None:
        if len(inputs) == 1:
            if inputs[0] is not out:
                self._backend.copy(out, inputs[0])
        elif len(inputs) == 2:
            self._operation(inputs[0], inputs[1], out=out)
        else:
            # Kept apart from out, which may be an input whose turn is yet to come.
            total = self._backend.scratch(0, self.name, len(out))
            self._operation(inputs[0], inputs[1], out=total)
            for array in inputs[2:-1]:
                self._operation(total, array, out=total)
            self._operation(total, inputs[-1], out=out)
        if last and self._finish:
            self._finish(out)

    @_quiet
    def inner(self, a: Array, b: Array) -> float:
        self._need_float("inner")
        total = 0.0
        step = self._backend.block_elements
        for start in range(0, len(a), step):
            left = self._converted(a[start : start + step], 0, "float64")
            right = self._converted(b[start : start + step], 1, "float64")
            total += self._backend.dot(left, right)
        return total

    @_quiet
    def blend(self, out: Array, a: Array, a_factor: float, b: Array, b_factor: float) -> None:
        self._need_float("blend")
        computed_in = "float64" if self.name == "float64" else "float32"
        by_a = self._backend.multiplier(computed_in, a_factor)
        by_b = self._backend.multiplier(computed_in, b_factor)
        add = self._backend.operation(computed_in, Reduction.SUM)
        step = self._backend.block_elements
        for start in range(0, len(out), step):
            left = self._converted(a[start : start + step], 0, computed_in)
            right = self._converted(b[start : start + step], 1, computed_in)
            by_a(left)
            by_b(right)
            add(left, right, out=left)
            self._backend.copy(out[start : start + step], left)

    def _converted(self, block: Array, slot: int, name: str) -> Array:
        converted = self._backend.scratch(slot, name, len(block))
        self._backend.copy(converted, block)
        return converted

    def _need_float(self, method: str) -> None:
        if self.name not in FLOATS:
            raise ArgumentTypeError(
                f"{method}() of {self.name} is not supported; it needs a floating-point type"
            )


class HalfKernel(BlockKernel):
    """float16 and bfloat16: computed in float32, rounded exactly once."""

    def _prepare(self) -> None:
        self.wide = self.reduction in (Reduction.SUM, Reduction.AVERAGE, Reduction.PRODUCT)
        self._operation = self._backend.operation("float32", self.reduction)
        self._finish = self._finisher("float32")
        self._scale_input = None
        self._prescale = None
        if self._prescale_factor != 1.0:
            multiply = self._backend.multiplier("float32", self._prescale_factor)
            if self.wide:
                self._scale_input = multiply
            else:
                self._prescale = functools.partial(self._scale_rounded, multiply)

    def _scale_rounded(self, multiply: Callable[[Array], Any], block: Array) -> None:
        values = self._converted(block, 0, "float32")
        multiply(values)
        self._backend.copy(block, values)

    def _is_one_pass(self, inputs: int, last: bool) -> bool:
        return False

    def combine_block(self, out: Array, inputs: Sequence[Array], last: bool) -> None:
        total = self._input(inputs[0], 0)
        for array in inputs[1:]:
            self._operation(total, self._input(array, 1), out=total)
        if last and self._finish:
            self._finish(total)
        self._backend.copy(out, total)

    def _input(self, block: Array, slot: int) -> Array:
        values = self._converted(block, slot, "float32")
        if self._scale_input:
            self._scale_input(values)
        return values


class IntegerKernel(BlockKernel):
    """Integers under anything but Average: they wrap as the type does and scale in float64."""

    def _prepare(self) -> None:
        self._prescale = self._multiplier(self._prescale_factor)
        self._finish = self._multiplier(self._postscale_factor)

    def _multiplier(self, factor: float) -> Callable[[Array], Any] | None:
        if factor == 1.0:
            return None
        return functools.partial(self._scale_truncated, self._backend.multiplier("float64", factor))

    def _scale_truncated(self, multiply: Callable[[Array], Any], block: Array) -> None:
        values = self._converted(block, 2, "float64")
        multiply(values)
        self._backend.truncate(block, values)


class IntegerAverage(IntegerKernel):
    """Average of integers of up to 32 bits: the exact sum in int64, divided once."""

    wide = True

    def _prepare(self) -> None:
        super()._prepare()
        self._add = self._backend.operation("int64", Reduction.SUM)
        self._divide = self._backend.divider("float64", self._size)
        self._postscale = self._backend.multiplier("float64", self._postscale_factor)

    def _is_one_pass(self, inputs: int, last: bool) -> bool:
        return False

    def combine_block(self, out: Array, inputs: Sequence[Array], last: bool) -> None:
        total = self._input(inputs[0], 0)
        for array in inputs[1:]:
            self._add(total, self._input(array, 1), out=total)
        if last and self._postscale_factor != 1.0:
            self._scaled_average(out, total)
            return
        if last:
            self._backend.truncating_divide(total, self._size)
        self._backend.copy(out, total)

    def _input(self, block: Array, slot: int) -> Array:
        if self._prescale:
            block = self._converted(block, 3, self.name)
            self._prescale(block)
        return self._converted(block, slot, "int64")

    def _scaled_average(self, out: Array, total: Array) -> None:
        # Multiplied before it is divided: 30 * 0.5 / 3 is 5, 30 * (0.5 / 3) falls short of it.
        values = self._converted(total, 2, "float64")
        self._postscale(values)
        self._divide(values)
        self._backend.truncate(out, values)


class LongAverage(IntegerAverage):
    """Average of int64, for which no wider type exists: sums of the values and of quotients.

    With x = N q + r and 0 <= r < N, the average is sum(q) + sum(r) / N. Both sum(x) and sum(q)
    may wrap, but sum(r) = sum(x) - N sum(q) is small, so it comes out right modulo 2**64, and
    so does the average, which lies within the type.
    """

    def combine_block(self, out: Array, inputs: Sequence[Array], last: bool) -> None:
        backend, add, size = self._backend, self._add, self._size
        total = self._input(inputs[0], 0)
        if not last:
            for array in inputs[1:]:
                add(total, self._input(array, 1), out=total)
            backend.copy(out, total)
            return
        quotients = backend.scratch(4, "int64", len(out))
        part = backend.scratch(5, "int64", len(out))
        backend.floor_divide(quotients, total, size)
        for array in inputs[1:]:
            values = self._input(array, 1)
            add(total, values, out=total)
            backend.floor_divide(part, values, size)
            add(quotients, part, out=quotients)
        self._remainders(total, quotients)
        if self._postscale_factor != 1.0:
            self._scaled_long_average(out, quotients, total)
            return
        # total holds sum(r): its quotient completes the floor, its remainder says what was cut off.
        backend.floor_divide(part, total, size)
        add(quotients, part, out=quotients)
        self._remainders(total, part)
        upward = (quotients < 0) & (total > 0)
        add(quotients, upward, out=out)

    def _remainders(self, total: Array, quotients: Array) -> None:
        """total[:] -= N quotients, modulo 2**64."""
        product = self._converted(quotients, 6, "int64")
        product *= self._size
        total -= product

    def _scaled_long_average(self, out: Array, quotients: Array, remainders: Array) -> None:
        values = self._converted(quotients, 2, "float64")
        values *= self._size
        values += remainders
        self._postscale(values)
        self._divide(values)
        self._backend.truncate(out, values)
