"""The few array operations that compression is written in, for whatever arrays it is given.

Every method's formula exists once: it calls the operations of a backend (``numpy_backend``, which describes them, and
``torch_backend``) and, through ``xp``, the functions that numpy and torch have under one name (abs, floor, where, ...).
"""

from __future__ import annotations

import functools
from typing import Any

from horo_lite.arrays import is_torch, type_name
from horo_lite.arrays.types import FLOATS
from horo_lite.compression.numpy_backend import NumpyBackend, quiet
from horo_lite.compression.torch_backend import HostTensorBackend, TorchBackend
from horo_lite.interfaces import Array

__all__ = ["Backend", "backend_of", "is_floating", "quiet", "work_type"]

Backend = NumpyBackend | TorchBackend

_NUMPY = NumpyBackend()


def backend_of(array: Array) -> Backend:
    """The operations for arrays such as this one."""
    return _torch_backend(array.device) if is_torch(array) else _NUMPY


@functools.cache
def _torch_backend(device: Any) -> TorchBackend:
    return HostTensorBackend(device) if device.type == "cpu" else TorchBackend(device)


def is_floating(array: Array) -> bool:
    """True for the types that compression applies to; others travel as they are."""
    return type_name(array) in FLOATS


def work_type(array: Array) -> str:
    """The type that a method computes in: the array's own, float32 for 16-bit floats."""
    name = type_name(array)
    return name if name == "float64" else "float32"
