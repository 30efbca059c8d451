"""Arrays of every framework as flat buffers of known types, and the arithmetic on them.

Knows only numpy, and torch through ``sys.modules``: whoever gives a tensor has imported torch.
``kernel`` makes what a collective is given as its reduction; the array, not the algorithm, decides
how it computes.
"""

from __future__ import annotations

import functools

from horo_lite.arrays.backend import Backend
from horo_lite.arrays.casts import cast
from horo_lite.arrays.flat import Flat, as_bytes, flat, plain_values, to_torch
from horo_lite.arrays.kernels import ArrayKernel, check_supported, make_kernel
from horo_lite.arrays.numpy_backend import NumpyBackend
from horo_lite.arrays.types import device_name, is_torch, item_bytes, numpy_dtype, type_name
from horo_lite.interfaces import Reduction

__all__ = [
    "ArrayKernel",
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
    "plain_values",
    "to_torch",
    "type_name",
]


@functools.lru_cache(maxsize=1024)
def kernel(
    type_name: str,
    reduction: Reduction,
    size: int,
    prescale: float = 1.0,
    postscale: float = 1.0,
    device: str = "cpu",
) -> ArrayKernel:
    """The arithmetic for flat arrays of one type, made once and kept; any thread may use it.

    Args:
        type_name: the element type, as ``arrays.type_name`` tells it.
        reduction: how values of several ranks become one.
        size: the number of ranks; Average divides by it.
        prescale: factor of every input. Each rank calls ``kernel.prescale(buffer)`` on its own
            input before the schedule starts; it does nothing where ``combine`` scales by itself.
        postscale: factor of the result, applied by ``combine(..., last=True)``.
        device: "cpu" for numpy arrays; for torch tensors their device ("cuda:1"), and "torch-cpu"
            for torch tensors in host memory.

    Raises:
        ArgumentTypeError: the type can't be reduced that way; names both.
    """
    return make_kernel(_backend(device), type_name, reduction, size, prescale, postscale)


@functools.cache
def _backend(device: str) -> Backend:
    if device == "cpu":
        return NumpyBackend()
    from horo_lite.arrays.torch_backend import TorchBackend  # only where torch is loaded

    return TorchBackend("cpu" if device == "torch-cpu" else device)
