"""``hvd.Compression`` here, and compressors that users wrote for TensorFlow tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horo_lite.compression import Compression, resolve
from horo_lite.interfaces import Compressor

__all__ = ["Compression", "for_tensorflow"]


def for_tensorflow(compression: Any) -> Compressor | None:
    """What the engine is given: None for no compression; a user's own class sees tensors, also within wrappers."""
    return None if compression is None else resolve(compression, tf.convert_to_tensor)
