"""Kernels for integers: what wraps, and averages that do not. The rules are in ``kernels``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from horo_lite.arrays.block_kernels import BlockKernel
from horo_lite.interfaces import Array, Reduction


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
