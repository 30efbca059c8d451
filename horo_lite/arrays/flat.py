"""One-dimensional contiguous views of whatever array a caller has, and the way back.

First stage of the data path. A C-contiguous array costs nothing here: its buffer is a view. Any other layout (a
transposed matrix, channels_last, a strided slice, foreign byte order) is copied into row-major order of its logical
shape, so that ranks whose layouts differ still exchange the same elements, and is copied back by ``write_back``.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from horo_lite.arrays.types import ITEM_BYTES, checked, is_torch, numpy_dtype, type_name
from horo_lite.errors import ArgumentError, ArgumentTypeError
from horo_lite.interfaces import Array


class Flat:
    """A flat, contiguous, row-major view of an array, or a copy of it where its layout allows no view.

    Args:
        array: a numpy array, or a torch tensor of any device; 0-d and zero-size arrays included.
        writable: the buffer will be written to, and ``write_back()`` is to carry the result to the caller's storage.
            When False the buffer is read only by agreement, since it may be the caller's own memory.

    Attributes:
        buffer: a numpy array for host memory (bfloat16 as ``ml_dtypes.bfloat16``), a torch tensor for a device.
        is_view: True where the buffer is the caller's own memory.

    Raises:
        ArgumentTypeError: the element type, or a tensor's layout (sparse, quantized), is not supported.
        ArgumentError: ``writable`` was asked for an array that can't be written.
    """

    __slots__ = ("_target", "buffer", "is_view", "type_name")

    def __init__(self, array: Any, writable: bool = False) -> None:
        self.type_name = type_name(array)
        if is_torch(array):
            self._target, self.buffer, self.is_view = _flat_tensor(array)
        else:
            self._target, self.buffer, self.is_view = _flat_numpy(array, self.type_name)
            if writable and not array.flags.writeable:
                raise ArgumentError(
                    f"cannot write in place to a read-only array of shape {tuple(array.shape)}; "
                    "pass array.copy(), or use the operation that returns its result"
                )

    def write_back(self) -> None:
        """Make the caller's storage hold what the buffer holds now (nothing to do for a view)."""
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


def as_bytes(buffer: Array) -> Array:
    """A flat array's memory as unsigned bytes, without a copy: what goes on the wire."""
    if is_torch(buffer):
        return buffer.view(sys.modules["torch"].uint8)
    return buffer.view(np.uint8)


def to_torch(buffer: Array) -> Any:
    """A flat numpy array as a torch CPU tensor of the same type and memory (torch must be loaded)."""
    torch = sys.modules["torch"]
    if buffer.dtype.name == "bfloat16":
        return torch.from_numpy(buffer.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(buffer)


def _flat_numpy(array: Any, name: str) -> tuple[Any, Array, bool]:
    if array.flags.c_contiguous and array.dtype.isnative:
        buffer = array.reshape(-1)
        return array, buffer.view(np.ndarray) if type(buffer) is not np.ndarray else buffer, True
    return (
        array,
        np.array(array, dtype=numpy_dtype(name), order="C", subok=False).reshape(-1),
        False,
    )


def _flat_tensor(tensor: Any) -> tuple[Any, Array, bool]:
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise ArgumentTypeError(
            f"expected a dense tensor with storage, got layout {tensor.layout} on device {tensor.device}; "
            "use to_dense(), or sparse_allreduce_async for sparse gradients"
        )
    target = (
        tensor.detach()
    )  # shares storage and is no leaf, so writing to a parameter raises nothing
    is_view = target.is_contiguous() and not target.is_conj() and not target.is_neg()
    dense = target if is_view else target.resolve_conj().resolve_neg().contiguous()
    buffer = dense.view(-1)
    if tensor.device.type == "cpu":
        buffer = _tensor_as_numpy(buffer)
    return target, buffer, is_view


def _tensor_as_numpy(buffer: Any) -> Array:
    torch = sys.modules["torch"]
    if buffer.dtype is torch.bfloat16:
        return buffer.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return buffer.numpy()


def torch_dtype(name: str) -> Any:
    """torch's dtype of the type ``name`` (torch must be loaded)."""
    return getattr(sys.modules["torch"], checked(name))


__all__ = ["ITEM_BYTES", "Flat", "as_bytes", "flat", "to_torch", "torch_dtype"]
