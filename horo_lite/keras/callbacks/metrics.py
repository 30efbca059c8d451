"""Metrics that are the same on all ranks, so that whatever decides by them decides alike."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from horo_lite import functions
from horo_lite.keras.backend import bridge
from horo_lite.keras.callbacks.callback import Callback
from horo_lite.process_sets import ProcessSet, global_process_set

_log = logging.getLogger("horo_lite")


class MetricAverageCallback(Callback):
    """Average the epoch's metrics over all ranks.

    Put it before callbacks that read metrics (EarlyStopping, ReduceLROnPlateau, ModelCheckpoint, TensorBoard): Keras
    calls callbacks in the order given. What Keras appends itself, the history and the progress bar, comes after.

    Metrics that not all ranks have are left as they are, with a warning on every rank that names them.

    Args:
        device: accepted for Horovod's sake.
        weighted: weigh each rank by the samples it saw, as one process would that saw them all.
        process_set: the ranks that take part.
    """

    def __init__(
        self, device: str = "", *, weighted: bool = False, process_set: ProcessSet = global_process_set
    ) -> None:
        super().__init__()
        self._weighted = weighted
        self._process_set = process_set
        self._train_samples: float | None = None
        self._validation_samples = 0.0
        self._warned: set[str] = set()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._train_samples, self._validation_samples = None, 0.0

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        # Validation within fit: the loss's counter still holds the epoch's samples, and is about to be reset.
        if self._weighted and self._train_samples is None:
            self._train_samples = self._samples()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._weighted:
            self._validation_samples = self._samples()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None or not self._process_set.included():
            return
        own = {name: float(value) for name, value in logs.items() if _is_number(value)}
        everyone = functions.allgather_object(sorted(own), "metrics.names", self._process_set)
        common = sorted(set.intersection(*map(set, everyone)))
        self._warn_of({name for names in everyone for name in names} - set(common), everyone)
        if not common:
            return
        weights = np.array([self._weight(name) for name in common])
        values = np.array([own[name] for name in common])
        # A weight of 0 takes a rank out, also when its metric is NaN since it saw nothing.
        products = np.where(weights > 0, values * weights, 0.0)
        sums = functions.allreduce(
            np.stack([products, weights]), op=functions.Sum, name="metrics", process_set=self._process_set
        )
        for name, total, weight in zip(common, *sums, strict=True):
            if weight > 0:
                logs[name] = float(total / weight)

    def _weight(self, name: str) -> float:
        if not self._weighted:
            return 1.0
        if name.startswith("val_"):
            return self._validation_samples
        return self._samples() if self._train_samples is None else self._train_samples

    def _samples(self) -> float:
        """The samples that the loss was averaged over."""
        for metric in self.model.metrics:
            if metric.name == "loss" and hasattr(metric, "count"):
                return float(bridge().to_array(metric.count))
        return 1.0

    def _warn_of(self, names: set[str], everyone: list[list[str]]) -> None:
        new = names - self._warned
        if new:
            self._warned |= new
            name = min(new)
            ranks = self._process_set.ranks or range(len(everyone))
            lacking = [rank for rank, known in zip(ranks, everyone, strict=False) if name not in known]
            _log.warning(
                "MetricAverageCallback: %s is not on all ranks (%s is missing on rank %s) and is left as it is. "
                "Callbacks that decide by it may decide differently: give every rank the same metrics and "
                "validation_data",
                ", ".join(sorted(new)), name, ", ".join(map(str, lacking)),
            )


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
