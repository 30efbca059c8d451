"""``hvd.Compression`` here, and compressors that users wrote for TensorFlow tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horo_lite.compression import Compression
from horo_lite.tensorflow.bridge import to_array

__all__ = ["Compression", "for_tensorflow"]


def for_tensorflow(compression: Any) -> Any:
    """What the engine is given: None for no compression; a user's own class sees tensors."""
    if compression is None or compression is Compression.none or isinstance(compression, Compression.none):
        return None
    horovod_style = callable(getattr(compression, "compress", None)) and not hasattr(compression, "reduce")
    return _OnTensors(compression) if horovod_style else compression


class _OnTensors:
    """A class written for Horovod's TensorFlow side, as one that takes and returns arrays."""

    def __init__(self, user: Any) -> None:
        self._user = user
        self.__name__ = getattr(user, "__name__", repr(user))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OnTensors) and other._user is self._user

    def __hash__(self) -> int:
        return id(self._user)

    def compress(self, array: Any) -> tuple[Any, Any]:
        tensor, context = self._user.compress(tf.convert_to_tensor(array))
        return to_array(tensor), context

    def decompress(self, array: Any, context: Any) -> Any:
        return to_array(self._user.decompress(tf.convert_to_tensor(array), context))
