"""Arrays of every framework as flat buffers of known types, and the arithmetic on them.

Knows only numpy, and torch through ``sys.modules``: whoever gives a tensor has imported torch. ``kernel`` makes what a
collective is given as its reduction; the array type, not the algorithm, decides how it computes.
"""

from __future__ import annotations

from horo_lite.arrays.casts import cast
from horo_lite.arrays.flat import Flat, as_bytes, flat, to_torch, torch_dtype
from horo_lite.arrays.kernels import check_supported, numpy_kernel
from horo_lite.arrays.types import device_name, is_torch, item_bytes, numpy_dtype, type_name
from horo_lite.interfaces import Kernel, Reduction

__all__ = [
    "Flat",
    "as_bytes",
    "cast",
    "check_supported",
    "device_name",
    "flat",
    "is_torch",
    "item_bytes",
    "kernel",
    "numpy_dtype",
    "to_torch",
    "torch_dtype",
    "type_name",
]


def kernel(
    type_name: str,
    reduction: Reduction,
    size: int,
    prescale: float = 1.0,
    postscale: float = 1.0,
    device: str = "cpu",
) -> Kernel:
    """The arithmetic for flat arrays of one type, made once and kept.

    Args:
        type_name: the element type, as ``arrays.type_name`` tells it.
        reduction: how values of several ranks become one.
        size: the number of ranks; Average divides by it.
        prescale: factor of every input. Each rank calls ``kernel.prescale(buffer)`` once on its own input before
            the schedule starts; kernels that apply it while they combine make that a no-op.
        postscale: factor of the result, applied by ``combine(..., last=True)``.
        device: "cpu" for numpy arrays, else the device of the torch tensors ("cuda", "cuda:1").

    Raises:
        ArgumentTypeError: the type can't be reduced that way; names both.
    """
    return numpy_kernel(type_name, Reduction(reduction), size, float(prescale), float(postscale))
