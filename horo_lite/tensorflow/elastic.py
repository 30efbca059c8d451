"""Horovod's elastic names for TensorFlow and Keras, in a world of fixed size: state that survives a failed operation.

``horo_lite.elastic`` says what that means; this adds states of variables and models, and takes the errors that graphs
wrap for what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horo_lite.context import rank
from horo_lite.elastic import ObjectState, VariableState, run_graphs, variables_of
from horo_lite.errors import ArgumentError, HorovodInternalError
from horo_lite.tensorflow.variables import broadcast_object, broadcast_variables, tf_variable


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of ``train(state, ...)``: initialises, and goes on from the last commit after a failure."""
    return run_graphs(func, (tf.errors.OpError,))


class TensorFlowState(VariableState):
    """Variables, and plain objects as attributes.

    Args:
        variables: ``tf.Variable`` or ``keras.Variable``.
        session: sessions belong to TensorFlow 1; None.
        **kwargs: objects, which become attributes.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if session is not None:
            raise ArgumentError("session: sessions belong to TensorFlow 1; leave it out")
        self._variables = list(variables or ())
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)

    def _current_variables(self) -> list[Any]:
        return [tf_variable(variable) for variable in self._variables]

    def _value(self, variable: Any) -> Any:
        return variable.numpy()

    def _broadcast(self, variables: list[Any]) -> None:
        broadcast_variables(variables, root_rank=0)


class TensorFlowKerasState(TensorFlowState):
    """A Keras model and its optimizer, and plain objects as attributes.

    Args:
        model: a built Keras model.
        optimizer: the model's own when None.
        **kwargs: objects, which become attributes.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        super().__init__(**kwargs)

    def _current_variables(self) -> list[Any]:
        return [tf_variable(variable) for variable in variables_of(self.model, self.optimizer)]


__all__ = ["HorovodInternalError", "ObjectState", "TensorFlowKerasState", "TensorFlowState", "run"]
