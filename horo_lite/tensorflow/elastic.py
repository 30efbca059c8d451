"""Horovod's elastic names for TensorFlow and Keras, in a world of fixed size: state that survives a failed operation.

``horo_lite.elastic`` says what that means; this adds states of variables and models, and takes the errors that graphs
wrap for what they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horo_lite.context import rank
from horo_lite.elastic import ObjectState
from horo_lite.elastic import run as _run
from horo_lite.errors import ArgumentError, HorovodInternalError
from horo_lite.tensorflow.variables import broadcast_object, broadcast_variables, tf_variable

_FAILED = ("HorovodInternalError", "DisagreementError", "PeerLostError", "ShutDownError")


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of ``train(state, ...)``: initialises, and goes on from the last commit after a failure."""

    @functools.wraps(func)
    def train(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(state, *args, **kwargs)
        except tf.errors.OpError as error:
            if any(name in str(error) for name in _FAILED):
                raise HorovodInternalError(str(error)) from error
            raise

    return _run(train)


class TensorFlowState(ObjectState):
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
        self._values: list[Any] = []
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)
        self._save_variables()

    def _current_variables(self) -> list[Any]:
        return [tf_variable(variable) for variable in self._variables]

    def _save_variables(self) -> None:
        self._values = [variable.numpy() for variable in self._current_variables()]

    def save(self) -> None:
        self._save_variables()
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self._current_variables(), self._values, strict=False):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        broadcast_variables(self._current_variables(), root_rank=0)
        self._save_variables()
        super().sync()


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
        if self.optimizer is not None and not self.optimizer.built and self.model.built:
            self.optimizer.build(self.model.trainable_variables)
        optimizer_variables = self.optimizer.variables if self.optimizer is not None else ()
        return [tf_variable(variable) for variable in [*self.model.weights, *optimizer_variables]]


__all__ = ["HorovodInternalError", "ObjectState", "TensorFlowKerasState", "TensorFlowState", "run"]
