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

from collections.abc import Sequence
from typing import Protocol

from horo_lite.arrays.backend import Backend
from horo_lite.arrays.block_kernels import BlockKernel, HalfKernel
from horo_lite.arrays.integer_kernels import IntegerAverage, IntegerKernel, LongAverage
from horo_lite.arrays.types import COMPLEX, HALVES, INTEGERS, MOVED_BYTES, checked
from horo_lite.errors import ArgumentTypeError
from horo_lite.interfaces import Array, Kernel, Reduction

_AND_OR = (Reduction.SUM, Reduction.MAX, Reduction.PRODUCT, Reduction.MIN)


class ArrayKernel(Kernel, Protocol):
    """A kernel as the engine sees it: schedules need no ``prescale``."""

    def prescale(self, buffer: Array) -> None:
        """Multiply a rank's own input by the prescale factor, in place, before its schedule starts.

        Does nothing where the factor is 1, or the kernel is wide and so scales its inputs while it combines.
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
    if name in MOVED_BYTES:
        raise ArgumentTypeError(
            f"{operation} of {name} is not supported; it can be broadcast, gathered and sent"
        )
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
