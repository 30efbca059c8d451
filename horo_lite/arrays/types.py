"""The supported element types: their names, sizes and numpy dtypes.

A type is known everywhere by numpy's name for it ("float32", "bool", "bfloat16"). The name is what
ranks compare, so numpy and torch arrays of one type agree. ml_dtypes is imported by the first use
of bfloat16 or float8, torch never: a tensor can only be given where torch is loaded already.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, cast

import numpy as np

from horo_lite.errors import ArgumentTypeError

ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
MOVED_BYTES: dict[str, int] = {
    "uint32": 4,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
}
"""Types with which nothing is computed: they can be broadcast, gathered and sent, not reduced."""
INTEGERS = frozenset({"uint8", "int8", "uint16", "int16", "int32", "int64"})
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
HALVES = frozenset({"float16", "bfloat16"})
COMPLEX = frozenset({"complex64", "complex128"})


def is_torch(array: Any) -> bool:
    """True for a torch tensor of any device."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def type_name(array: Any) -> str:
    """The name of an array's or a tensor's element type.

    Raises:
        ArgumentTypeError: the type is not supported; names it.
    """
    if isinstance(array, (np.ndarray, np.generic)) or is_torch(array):
        return _dtype_name(array.dtype)
    raise ArgumentTypeError(
        f"expected a numpy array or a torch tensor, got {type(array).__name__}; "
        "numpy.asarray() makes one"
    )


@functools.cache  # numpy takes 5 us to name a dtype
def _dtype_name(dtype: Any) -> str:
    return checked(dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch."))


def checked(name: str) -> str:
    """``name`` itself where it is a supported type.

    Raises:
        ArgumentTypeError: it is not; names it and what is supported.
    """
    if name not in ITEM_BYTES and name not in MOVED_BYTES:
        raise ArgumentTypeError(
            f"element type {name} is not supported; supported are {', '.join(ITEM_BYTES)}, "
            f"and {', '.join(MOVED_BYTES)} where nothing is computed"
        )
    return name


def item_bytes(name: str) -> int:
    """Bytes of one element of the type ``name``."""
    return ITEM_BYTES.get(name) or MOVED_BYTES[checked(name)]


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of the type ``name``, in the machine's byte order."""
    if is_foreign(checked(name)):
        import ml_dtypes  # 14 ms, and only such an array needs it

        return cast("np.dtype[Any]", np.dtype(getattr(ml_dtypes, name)))
    return np.dtype(name)


def is_foreign(name: str) -> bool:
    """True for types that numpy has from ml_dtypes, and does not exchange with torch."""
    return name.startswith(("bfloat", "float8"))


def device_name(array: Any) -> str:
    """Where an array lives: "cpu", or torch's name of the device ("cuda:0")."""
    return str(array.device) if is_torch(array) and not array.is_cpu else "cpu"
