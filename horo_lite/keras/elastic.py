"""Horovod's elastic names for Keras, in a world of fixed size: see ``horo_lite.elastic``."""

from __future__ import annotations

from typing import Any

import keras

from horo_lite.tensorflow.elastic import TensorFlowKerasState, run


class KerasState(TensorFlowKerasState):
    """A Keras model and its optimizer, and plain objects as attributes."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


class CommitStateCallback(keras.callbacks.Callback):
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


class UpdateBatchStateCallback(keras.callbacks.Callback):
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


class UpdateEpochStateCallback(keras.callbacks.Callback):
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
