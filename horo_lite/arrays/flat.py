"""One-dimensional contiguous views of whatever array a caller has, and the way back.

A C-contiguous array costs nothing here: its buffer is a view. Any other layout (a transposed
matrix, channels_last, a strided slice, foreign byte order) is copied into row-major order of its
logical shape, so that ranks whose layouts differ still exchange the same elements, and is copied
back by ``write_back``.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from horo_lite.arrays.types import is_foreign, is_torch, numpy_dtype, type_name
from horo_lite.errors import ArgumentError, ArgumentTypeError
from horo_lite.interfaces import Array

_WORDS = {1: "uint8", 2: "int16"}
"""By size, what numpy and torch exchange where they do not know one another's type."""


class Flat:
    """A flat, contiguous, row-major view of an array, or a copy where its layout allows no view.

    Args:
        array: a numpy array, or a torch tensor of any device; 0-d and zero-size included.
        writable: the buffer will be written to, and ``write_back()`` is to carry the result to the
            caller's storage. When False nobody may write to the buffer: it may be the caller's.

    Attributes:
        buffer: a numpy array for host memory (bfloat16 and float8 as ml_dtypes'), a tensor for a device.
        is_view: True where the buffer is the caller's own memory.
        type_name: the element type.

    Raises:
        ArgumentTypeError: the element type or the layout (sparse, quantized) is not supported.
        ArgumentError: ``writable`` was asked for an array that can't be written.
    """

    __slots__ = ("_target", "buffer", "is_view", "type_name")

    def __init__(self, array: Any, writable: bool = False) -> None:
        self.type_name = type_name(array)
        if is_torch(array):
            self._target, self.buffer, self.is_view = _flat_tensor(array)
            return
        self._target, self.buffer, self.is_view = _flat_numpy(array, self.type_name)
        if writable and not (isinstance(array, np.ndarray) and array.flags.writeable):
            raise ArgumentError(
                f"cannot write in place to a read-only array of shape {array.shape}; "
                "pass a copy, or use the operation that returns its result"
            )

    def write_back(self) -> None:
        """Make the caller's storage hold what the buffer holds (for a view it does already)."""
        if self.is_view:
            return
        if is_torch(self._target):
            source = self.buffer if is_torch(self.buffer) else to_torch(self.buffer)
            self._target.copy_(source.view(self._target.shape))
        else:
            self._target[...] = self.buffer.reshape(self._target.shape)


def flat(array: Any) -> Array:
    """The flat buffer of an array that is only read."""
    return Flat(array).buffer


def plain_values(array: Any) -> np.ndarray[Any, Any] | None:
    """An array's own memory as a numpy array of its shape, where that is writable, aligned and row-major; else None.

    The quick look at what is nearly every argument; ``Flat`` serves all.
    """
    if type(array) is not np.ndarray:
        try:
            array = array.numpy()
        except (AttributeError, RuntimeError, TypeError):
            return None
    return array if array.flags.carray else None


def as_bytes(buffer: Array) -> Array:
    """A flat array's memory as unsigned bytes, without a copy: what goes on the wire."""
    if is_torch(buffer):
        torch: Any = sys.modules["torch"]
        if not len(buffer):  # its stride may be anything, which view() refuses
            return buffer.new_empty(0, dtype=torch.uint8)
        return buffer.view(torch.uint8)
    return buffer.view(np.uint8)


def to_torch(buffer: Array) -> Any:
    """A numpy array as a torch CPU tensor of the same type and memory (torch must be loaded)."""
    torch: Any = sys.modules["torch"]
    name = buffer.dtype.name
    if is_foreign(name):
        return torch.from_numpy(buffer.view(_WORDS[buffer.itemsize])).view(getattr(torch, name))
    return torch.from_numpy(buffer)


def _flat_numpy(array: Any, name: str) -> tuple[Any, Array, bool]:
    plain = np.asarray(array)  # drops subclasses, whose arithmetic may differ
    if plain.flags.c_contiguous and plain.dtype.isnative:
        return plain, plain.reshape(-1), True
    return plain, np.array(plain, dtype=numpy_dtype(name), order="C").reshape(-1), False


def _flat_tensor(tensor: Any) -> tuple[Any, Array, bool]:
    try:
        plain = tensor.numpy()  # the usual case by one call: whatever is not usual raises
        if plain.flags.c_contiguous:
            return tensor, plain.reshape(-1), True
    except (RuntimeError, TypeError):
        pass
    torch: Any = sys.modules["torch"]
    if tensor.is_meta:
        raise ArgumentTypeError(
            f"a tensor of shape {tuple(tensor.shape)} on device meta has no values; make it real first (to_empty())"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ArgumentTypeError(
            f"expected a dense tensor with storage, got layout {tensor.layout}, dtype "
            f"{tensor.dtype} on device {tensor.device}; use to_dense(), or for sparse gradients "
            "sparse_allreduce_async"
        )
    target = tensor.detach()  # shares storage and is no leaf, so a parameter can be written
    is_view = target.is_contiguous() and not target.is_conj() and not target.is_neg()
    dense = target if is_view else target.resolve_conj().resolve_neg().contiguous()
    if not tensor.is_cpu:
        return target, dense.view(-1), is_view
    name = type_name(dense)
    if is_foreign(name):
        words = dense.view(getattr(torch, _WORDS[dense.itemsize])).numpy()
        return target, words.reshape(-1).view(numpy_dtype(name)), is_view
    return target, dense.numpy().reshape(-1), is_view
