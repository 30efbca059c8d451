"""Keras on TensorFlow. See ``backend.Bridge``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horo_lite.exchange_options import ExchangeOptions
from horo_lite.functions import Min
from horo_lite.tensorflow import bridge
from horo_lite.tensorflow.collectives import allreduce
from horo_lite.tensorflow.compression import for_tensorflow
from horo_lite.tensorflow.gradients import GradientReducer
from horo_lite.tensorflow.tape import parameter_specs
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
    """The buckets of these variables; names are their paths in the model."""
    own = [unwrapped(variable) for variable in variables]
    return GradientReducer(options, parameter_specs(variables), own, gradients, share)


def dense(gradient: Any) -> Any:
    """``tf.IndexedSlices`` as a tensor; rows of equal index are added."""
    return tf.convert_to_tensor(gradient)


def all_true(flag: Any, options: ExchangeOptions, name: str) -> Any:
    """The minimum over ranks, eager or in a graph."""
    label = name if tf.executing_eagerly() else bridge.graph_name(name)
    number = allreduce(tf.cast(flag, tf.uint8), op=Min, name=label, process_set=options.process_set)
    return tf.cast(number, tf.bool)


def to_array(value: Any) -> Any:
    """The values; not of a symbolic tensor."""
    return np.asarray(bridge.to_array(unwrapped(value)))
