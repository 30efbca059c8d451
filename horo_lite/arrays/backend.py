"""What the kernels need of numpy or torch: elementwise work on flat arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from horo_lite.interfaces import Array, Reduction


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
