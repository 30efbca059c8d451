"""Horovod's elastic names for Keras, in a world of fixed size: see ``horo_lite.elastic``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from horo_lite.context import rank
from horo_lite.elastic import VariableState, run_graphs, variables_of
from horo_lite.functions import broadcast_object
from horo_lite.keras.backend import bridge
from horo_lite.keras.broadcasting import broadcast_variables
from horo_lite.keras.callbacks.callback import Callback


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of ``train(state, ...)``: initialises, and goes on from the last commit after a failure."""
    return run_graphs(func, bridge().graph_errors)


class KerasState(VariableState):
    """A Keras model and its optimizer, and plain objects as attributes.

    Args:
        model: a built Keras model.
        optimizer: the model's own when None.
        **kwargs: objects, which become attributes.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)

    def _current_variables(self) -> list[Any]:
        if hasattr(self.model, "jax_state_sync"):  # on jax, a model's values are elsewhere during an epoch
            self.model.jax_state_sync()
        return variables_of(self.model, self.optimizer)

    def _value(self, variable: Any) -> Any:
        return np.array(bridge().to_array(variable))

    def _broadcast(self, variables: list[Any]) -> None:
        broadcast_variables(variables, root_rank=0)


class CommitStateCallback(Callback):
    """Commit the state every so many batches, and at the end of each epoch.

    Args:
        state: what is committed.
        batches_per_commit: how often.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self._state = state
        self._every = batches_per_commit
        self._left = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._left = self._every

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._left -= 1
        if self._left == 0:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._commit()

    def _commit(self) -> None:
        self._left = self._every
        self._state.commit()


class UpdateBatchStateCallback(Callback):
    """Keep ``state.batch`` at the batch that is next, and skip those already done when an epoch is resumed.

    Args:
        state: has an attribute ``batch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.params and self.params.get("steps"):
            self.params["steps"] -= self._state.batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._state.batch = batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._state.batch = 0


class UpdateEpochStateCallback(Callback):
    """Keep ``state.epoch`` at the epoch that is next, counted on from where training was resumed.

    Args:
        state: has an attribute ``epoch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state
        self._initial = state.epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._initial = self._state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._state.epoch = self._initial + epoch + 1


__all__ = [
    "CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run",
]
