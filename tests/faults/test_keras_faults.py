"""Faults in Keras' fit: in a callback, in the data, in a graph function, a rank that stops early."""

from __future__ import annotations

import pytest

from tests.faults.jobs import STALL, assert_bad_end, job, needs

pytestmark = needs("tensorflow", "keras")

PREAMBLE = """
import os, time
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import numpy as np
import keras
import tensorflow as tf
import horo_lite.keras as hvd

hvd.init()
rank = hvd.rank()
x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")

def fit(**options):
    model.fit(x, y, batch_size=2, verbose=0, **options)
"""


def keras_job(body: str, **options):
    return job(body, preamble=PREAMBLE, limit_s=180, **options)


def test_an_exception_in_a_callback():
    done = keras_job("""
        class Broken(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if rank == 1 and batch == 1:
                    raise ValueError("in a callback")
        fit(callbacks=[Broken()])
        time.sleep(100)
    """)
    assert_bad_end(done, r"\[rank 1\] ValueError: in a callback")


def test_an_exception_in_a_graph_function():
    done = keras_job("""
        def fail(value):
            raise ValueError("in a function")
        @tf.function
        def work():
            return tf.numpy_function(fail, [tf.ones(3)], tf.float32)
        work() if rank == 1 else fit(epochs=10**6)
    """)
    assert_bad_end(done, r"\[rank 1\] .*ValueError: in a function")


@pytest.mark.slow
def test_an_exception_in_a_train_step():
    done = keras_job("""
        class Broken(keras.Model):
            def train_step(self, data):
                if rank == 1:
                    raise ValueError("in a train step")
                return super().train_step(data)
        inputs = keras.Input((4,))
        broken = Broken(inputs, keras.layers.Dense(1)(inputs))
        broken.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        broken.fit(x, y, verbose=0)
    """)
    assert_bad_end(done, r"\[rank 1\] ValueError: in a train step")


@pytest.mark.slow
def test_a_rank_with_fewer_batches():
    average = "hvd.callbacks.MetricAverageCallback()"
    done = keras_job(f"fit(steps_per_epoch=2 + (rank == 0), callbacks=[{average}])", env=STALL)
    assert_bad_end(done, "waited")


def test_a_rank_with_fewer_epochs():
    done = keras_job("fit(epochs=2 + (rank == 0))", env=STALL)
    assert_bad_end(done, "has waited .*rank 1 has finished")


def test_a_rank_that_stops_by_itself():
    done = keras_job("""
        class Stop(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                self.model.stop_training = rank == 0
        fit(epochs=3, callbacks=[Stop()])
    """, env=STALL)
    assert_bad_end(done, "has waited .*rank 0 has finished")
