"""Keras callbacks for training on several ranks, with Horovod's names and some of our own."""

from __future__ import annotations

from horo_lite.keras.callbacks.agreement import (
    ConsistencyCallback,
    EarlyStoppingAgreementCallback,
    JoinCallback,
)
from horo_lite.keras.callbacks.broadcast import BroadcastGlobalVariablesCallback
from horo_lite.keras.callbacks.checkpoint import BestModelCheckpoint
from horo_lite.keras.callbacks.learning_rate import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from horo_lite.keras.callbacks.metrics import MetricAverageCallback

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "ConsistencyCallback",
    "EarlyStoppingAgreementCallback",
    "JoinCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
