"""Kernels that go block by block: the base of all, and that of 16-bit floats. The rules are in ``kernels``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from horo_lite.arrays.backend import Backend
from horo_lite.arrays.types import FLOATS
from horo_lite.errors import ArgumentError, ArgumentTypeError
from horo_lite.interfaces import Array, Reduction

# inf - inf is a result, not news. As a decorator it costs half of what a with statement does.
_quiet: Callable[[Any], Any] = np.errstate(all="ignore")


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
        if self.wide or self._prescale is None:
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
