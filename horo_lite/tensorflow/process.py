"""Horovod's graph operations for rank and size: read when the graph runs, so they stay right when the world changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from horo_lite import context


def _scalar(read: Callable[[], int]) -> tf.Tensor:
    if tf.executing_eagerly():
        return tf.constant(read(), tf.int32)
    result = tf.numpy_function(lambda: np.int32(read()), [], tf.int32, stateful=True)
    result.set_shape(())
    return result


def _member(process_set_id: int) -> Any:
    return context.current().members[process_set_id]


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The number of ranks of a process set, as a tensor."""
    return _scalar(lambda: len(_member(process_set_id).ranks))


def rank_op(name: str | None = None) -> tf.Tensor:
    """This process's rank, as a tensor."""
    return _scalar(context.rank)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """This process among those of its node, as a tensor."""
    return _scalar(context.local_rank)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """The number of processes on this node, as a tensor."""
    return _scalar(context.local_size)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1 where this rank is in the process set, 0 where it is not, -1 before ``init()``, -2 for an unknown set."""

    def included() -> int:
        if not context.is_initialized():
            return -1
        if process_set_id not in context.current().members:
            return -2
        return int(context.rank() in _member(process_set_id).ranks)

    return _scalar(included)
