"""Variables and Python objects from one rank to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horo_lite import functions
from horo_lite.errors import ArgumentError
from horo_lite.exchange_options import check_same_variables, variable_path
from horo_lite.process_sets import ProcessSet, global_process_set
from horo_lite.tensorflow.bridge import do_not_convert, exchange
from horo_lite.tensorflow.collectives import _name, _same


@do_not_convert
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Give every rank the values of the root's variables, eager or in a graph.

    Args:
        variables: ``tf.Variable`` or ``keras.Variable``, in the same order on every rank.
        root_rank: the global rank that sends.
        inplace: accepted for Horovod's sake; there is one way here.
    """
    broadcast_(variables, root_rank, process_set=process_set)


@do_not_convert
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Give every rank the values of the root's variables; returns them. See ``broadcast_variables``."""
    variables = list(variables)
    own: list[Any] = [tf_variable(variable) for variable in variables]
    if not own:
        return own
    label = _name(name or "broadcast_variables" if tf.executing_eagerly() else name, "broadcast_variables")
    if tf.executing_eagerly():  # ranks may trace a graph a different number of times
        check_same_variables(
            [(variable_path(v), tuple(t.shape), t.dtype.name) for v, t in zip(variables, own, strict=True)],
            [bool(getattr(variable, "trainable", False)) for variable in variables],
            process_set,
        )
    values = [variable.read_value() for variable in own]

    def start(arrays: list[Any]) -> list[Any]:
        return [
            functions.broadcast_async(array, root_rank, f"{label}.{index}", process_set)
            for index, array in enumerate(arrays)
        ]

    def finish(handles: list[Any]) -> list[Any]:
        return [functions.synchronize(handle) for handle in handles]

    received = exchange(values, start, finish, _same(values), "broadcast_variables")
    for variable, value in zip(own, received, strict=True):
        variable.assign(value)
    return own


def unwrapped(variable: Any) -> Any:
    """The ``tf.Variable`` behind a Keras one; anything else as it is."""
    inner = None if isinstance(variable, tf.Variable) else getattr(variable, "value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def tf_variable(variable: Any) -> Any:
    """The ``tf.Variable`` behind a Keras one.

    Raises:
        ArgumentError: it is neither.
    """
    inner = unwrapped(variable)
    if isinstance(inner, tf.Variable):
        return inner
    raise ArgumentError(f"expected a tf.Variable or a keras.Variable, got {type(variable).__name__}")


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give every rank the root's Python object (pickled by cloudpickle)."""
    _refuse_session(session)
    return functions.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """A function that gives every rank the root's object, for repeated use."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's Python object, in rank order (pickled by cloudpickle)."""
    _refuse_session(session)
    return functions.allgather_object(obj, name, process_set)


def broadcast_global_variables(root_rank: int) -> None:
    """TensorFlow 1 only, where variables were global.

    Raises:
        RuntimeError: always, as in Horovod under eager execution; says what to use.
    """
    raise RuntimeError(
        "hvd.broadcast_global_variables() does not support eager execution: "
        "please use hvd.broadcast_variables(<model/optimizer variables>, root_rank)"
    )


class BroadcastGlobalVariablesHook:
    """The session hook of TensorFlow 1's estimators, which TensorFlow 2.16 and newer no longer have.

    Raises:
        RuntimeError: always; says what to use.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        raise RuntimeError(
            "BroadcastGlobalVariablesHook was for sessions and estimators, which this TensorFlow does not have: "
            "use hvd.broadcast_variables(variables, root_rank), or hvd.callbacks.BroadcastGlobalVariablesCallback "
            "in Keras"
        )


def _refuse_session(session: Any) -> None:
    if session is not None:
        raise ArgumentError("session: sessions belong to TensorFlow 1; leave it out")
