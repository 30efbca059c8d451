"""What wrapped optimizers need of TensorFlow. See ``horo_lite.keras.backend.Bridge``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horo_lite.exchange_options import ExchangeOptions, ParameterSpec
from horo_lite.functions import Min
from horo_lite.tensorflow import bridge
from horo_lite.tensorflow.collectives import allreduce
from horo_lite.tensorflow.compression import for_tensorflow
from horo_lite.tensorflow.gradients import GradientReducer
from horo_lite.tensorflow.tape import parameter_specs as parameters
from horo_lite.tensorflow.variables import unwrapped

graph_errors = (tf.errors.OpError,)


def native(variable: Any) -> Any:
    """The ``tf.Variable``."""
    return unwrapped(variable)


def compression(compression: Any) -> Any:
    """A user's own compressor sees TensorFlow's tensors."""
    return for_tensorflow(compression)


def make_reducer(
    options: ExchangeOptions, variables: Sequence[Any], gradients: Sequence[Any], share: bool
) -> GradientReducer:
    """Dense gradients in buckets, sparse ones gathered."""
    own = [unwrapped(variable) for variable in variables]
    return GradientReducer(options, parameters(variables), own, gradients, share)


def dense(gradient: Any, type_name: str) -> Any:
    """``tf.IndexedSlices`` as a tensor; rows of equal index are added."""
    return tf.cast(tf.convert_to_tensor(gradient), type_name)


def on_host(
    function: Callable[[Sequence[Any]], Sequence[Any]], tensors: Sequence[Any], outputs: Sequence[ParameterSpec]
) -> list[Any]:
    """At once, or as nodes of the graph."""
    specs = [tf.TensorSpec(shape, type_name) for _, shape, type_name in outputs]
    return bridge.exchange(tensors, function, lambda results: list(results), specs, "on_host")


def when(condition: Any, action: Callable[[], None], variables: Sequence[Any]) -> None:
    """At once, or as a branch of the graph."""
    tf.cond(condition, action, lambda: None)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Itself: tracing is how a graph is made, and an exchange is nodes of it."""
    return function


def in_update(optimizer: Any, action: Callable[[], Any], otherwise: Any) -> Any:
    """Keras asks in the pass of an update only."""
    return action()


def settle() -> None:
    """A step has ended when its function returns."""


def all_true(flag: Any, options: ExchangeOptions, name: str) -> Any:
    """The minimum over ranks, eager or in a graph."""
    label = name if tf.executing_eagerly() else bridge.graph_name(name)
    number = allreduce(tf.cast(flag, tf.uint8), op=Min, name=label, process_set=options.process_set)
    return tf.cast(number, tf.bool)


def to_array(value: Any) -> Any:
    """The values; not of a symbolic tensor."""
    return np.asarray(bridge.to_array(unwrapped(value)))
