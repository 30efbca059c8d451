"""A Keras training step with and without the exchange, in one run: eight Dense(1024) layers, batch 32.

    mpirun -np 2 python benchmarks/training_step_keras.py

Both models take turns, epoch by epoch, so that a busy machine slows both. The table is printed by rank 0.
"""

from __future__ import annotations

import argparse
import statistics
import time

import keras
import numpy as np

import horo_lite.keras as hvd


class StepTimes(keras.callbacks.Callback):
    """The seconds of each step, without the first two of an epoch."""

    def __init__(self):
        super().__init__()
        self.seconds = []
        self._began = 0.0

    def on_train_batch_begin(self, batch, logs=None):
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        if batch >= 2:
            self.seconds.append(time.perf_counter() - self._began)


def make_model(optimizer, layers, width):
    model = keras.Sequential([keras.Input((width,)), *(keras.layers.Dense(width) for _ in range(layers))])
    model.compile(optimizer, "mse")
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    hvd.init()
    models = {
        "no exchange": make_model(keras.optimizers.SGD(0.01), options.layers, options.width),
        "horo_lite": make_model(
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), options.layers, options.width
        ),
    }
    times = {name: StepTimes() for name in models}
    x = np.random.default_rng(hvd.rank()).random((32 * options.steps, options.width), "float32")
    for _ in range(options.rounds):
        for name, model in models.items():
            hvd.barrier()
            model.fit(x, x, batch_size=32, verbose=0, shuffle=False, callbacks=[times[name]])
    if hvd.rank() == 0:
        base = statistics.median(times["no exchange"].seconds)
        print(f"{hvd.size()} ranks, {options.layers} x Dense({options.width}), batch 32: median step")
        for name, taken in times.items():
            median = statistics.median(taken.seconds)
            print(f"{name:12} {median * 1e3:8.1f} ms  {(median - base) * 1e3:+8.1f} ms  {median / base:5.2f} x")


if __name__ == "__main__":
    main()
