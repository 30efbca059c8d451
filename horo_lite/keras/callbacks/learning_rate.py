"""Learning rates by epoch and batch, with Horovod's warm-up.

The correction of momentum follows Goyal et al. 2017 (arXiv:1706.02677, section 3): where the learning rate is part of
the momentum, as in SGD, the momentum is scaled with it when it changes. Horovod scales the factor for one batch; here
the accumulated momentum itself is scaled, which is the same step and also works in a graph that holds the factor as
a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras.src.utils import io_utils

from horo_lite.context import size
from horo_lite.errors import ArgumentError
from horo_lite.keras.backend import bridge
from horo_lite.keras.callbacks.callback import Callback


class LearningRateScheduleCallback(Callback):
    """Set the learning rate to ``initial_lr * multiplier(epoch)``.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a function of the epoch, or a constant m for ``m ** (epoch - start_epoch)``.
        start_epoch: the first epoch in which it acts.
        end_epoch: the first epoch in which it no longer does; None for never.
        staircase: change at the beginning of epochs only; False: at every batch, with a fraction of an epoch.
        momentum_correction: scale accumulated momentum with the learning rate (SGD, RMSprop).
        steps_per_epoch: the batches of an epoch, where Keras does not know them.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ArgumentError("initial_lr: expected a learning rate, got None")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.multiplier: Callable[[float], float]
        if callable(multiplier):
            self.staircase, self.multiplier = staircase, multiplier
        else:
            constant = float(multiplier)
            self.staircase = True
            self.multiplier = lambda epoch: constant ** (epoch - start_epoch)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise ArgumentError(
                f"{type(self).__name__}: Keras does not know how many batches an epoch has; pass steps_per_epoch"
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._adjust(epoch)
        elif not self.staircase:
            self._adjust(epoch + batch / (self.steps_per_epoch or 1))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = _learning_rate(self.model.optimizer)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old = _learning_rate(optimizer)
        new = self.initial_lr * self.multiplier(epoch)
        if new == old:
            return
        try:
            optimizer.learning_rate = new
        except TypeError as error:
            raise ArgumentError(
                f"{type(self).__name__}: the optimizer has a LearningRateSchedule of its own; give it a number"
            ) from error
        if self.momentum_correction and old > 0:
            for momentum in _momentums(optimizer):
                momentum.assign(momentum * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from ``initial_lr / size()`` to ``initial_lr`` over the first epochs (Goyal et al. 2017).

    Args:
        initial_lr: the learning rate for all ranks together.
        warmup_epochs: how long it takes.
        momentum_correction: as for ``LearningRateScheduleCallback``.
        steps_per_epoch: as for ``LearningRateScheduleCallback``.
        verbose: 1 to say so when it is done.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            epoch += 1.0 / (self.steps_per_epoch or 1)  # round numbers at the end of each epoch
            return 1.0 / size() * (epoch * (size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr, multiplier, end_epoch=warmup_epochs, staircase=False,
            momentum_correction=momentum_correction, steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose > 0 and self.end_epoch is not None and epoch == self.end_epoch - 1:
            rate = _learning_rate(self.model.optimizer)
            io_utils.print_msg(
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}."
            )


def _learning_rate(optimizer: Any) -> float:
    return float(bridge().to_array(optimizer.learning_rate))


def _momentums(optimizer: Any) -> list[Any]:
    """The accumulated momentum where the learning rate is part of it."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not getattr(optimizer, "momentum", 0.0) or not getattr(optimizer, "built", True):
        return []
    slots = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None)  # SGD; RMSprop
    return [variable for variable in slots or () if variable is not None]
