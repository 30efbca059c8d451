"""Batch normalization with the statistics of all ranks' batches together."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from horo_lite.errors import ArgumentError
from horo_lite.functions import Sum
from horo_lite.process_sets import ProcessSet, global_process_set
from horo_lite.tensorflow.collectives import allreduce


@keras.saving.register_keras_serializable(package="horo_lite")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """``keras.layers.BatchNormalization`` whose mean and variance in training are those of the whole batch.

    Ranks count by their samples, so their batches may differ in size. Outside of training nothing is exchanged.

    Args:
        fused: accepted for Horovod's sake; only False is possible.
        process_set: the ranks that take part.
        **kwargs: as for ``keras.layers.BatchNormalization``.
    """

    def __init__(
        self, fused: bool = False, *, process_set: ProcessSet = global_process_set, **kwargs: Any
    ) -> None:
        if fused in (True, None):
            raise ArgumentError("SyncBatchNormalization does not support fused=True")
        super().__init__(**kwargs)
        self._process_set = process_set

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        if self._process_set.process_set_id != 0 and not self._process_set.included():
            return mean, variance
        count = self._count(inputs, mask, mean.dtype)
        # Two sums: a variance from squares alone would lose its digits where the mean is large.
        total = self._sum(tf.concat([mean * count, [count]], 0))
        samples = tf.maximum(total[-1], 1)
        joined_mean = total[:-1] / samples
        spread = variance + tf.square(mean - joined_mean)
        return joined_mean, self._sum(spread * count) / samples

    def _count(self, inputs: Any, mask: Any, dtype: Any) -> Any:
        if mask is not None:
            weights = tf.cast(tf.broadcast_to(mask, tf.shape(inputs)[:-1]), dtype)
            return tf.reduce_sum(weights)
        shape = tf.shape(inputs)
        return tf.cast(tf.reduce_prod([shape[axis] for axis in self._reduction_axes]), dtype)

    def _sum(self, value: Any) -> Any:
        return allreduce(value, op=Sum, process_set=self._process_set)
