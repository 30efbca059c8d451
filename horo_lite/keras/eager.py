"""Horovod's collectives for Keras: on values, at once, numpy arrays as results."""

from __future__ import annotations

from typing import Any

from horo_lite import functions
from horo_lite.compression import Compression
from horo_lite.functions import Average
from horo_lite.interfaces import Reduction
from horo_lite.keras.backend import bridge


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Reduction | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Reduce a tensor, variable, array or number over all ranks; returns an array."""
    return functions.allreduce(
        bridge().to_array(value), average, name, bridge().compression(compression), op, prescale_factor,
        postscale_factor,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate every rank's value along the first dimension; returns an array."""
    return functions.allgather(bridge().to_array(value), name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Give every rank the root's value; returns an array."""
    return functions.broadcast(bridge().to_array(value), root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: Reduction = Average) -> Any:
    """Reduce, and leave each rank its part of the first dimension; returns an array."""
    return functions.reducescatter(bridge().to_array(value), name, op)


def broadcast_global_variables(root_rank: int) -> None:
    """TensorFlow 1 only, where variables were global.

    Raises:
        RuntimeError: always, as in Horovod under eager execution; says what to use.
    """
    raise RuntimeError(
        "hvd.broadcast_global_variables() does not support eager execution: please use "
        "hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank), or "
        "hvd.broadcast_variables(model.weights, root_rank)"
    )
