"""DistributedOptimizer in fit: one rule, w = 0, x = 1, target 2 * rank + 1, mean squared error, SGD(0.1).

The gradient on rank r is -2 (2 r + 1); the mean over N ranks is -2 N, so one step gives w = 0.2 N.
"""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras")


def linear(**layer):
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", **layer)
    return keras.Sequential([keras.Input((1,)), dense])


def data(hvd, rows=1):
    return np.ones((rows, 1), np.float32), np.full((rows, 1), 2.0 * hvd.rank() + 1, np.float32)


def fit(hvd, model, rows=1, **arguments):
    x, y = data(hvd, rows)
    return model.fit(x, y, batch_size=1, verbose=0, shuffle=False, **arguments)


def weight(model):
    return float(np.ravel(model.get_weights()[0])[0])


@pytest.mark.parametrize("how", ["eager", "auto", "jit"])
def test_one_batch_of_fit(hvd, how):
    model = linear()
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse",
        run_eagerly=how == "eager", jit_compile=True if how == "jit" else "auto",
    )
    fit(hvd, model)
    assert weight(model) == pytest.approx(0.2 * hvd.size(), abs=1e-6)
    fit(hvd, model)  # gradient 2 (w - y): mean 2 (0.2 N - N) = -1.6 N
    assert weight(model) == pytest.approx(0.36 * hvd.size(), abs=1e-6)


def test_sum_and_predivide(hvd):
    model = linear()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Sum), "mse")
    fit(hvd, model)
    assert weight(model) == pytest.approx(0.2 * hvd.size() ** 2, abs=1e-5)
    model = linear()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), gradient_predivide_factor=2.0), "mse")
    fit(hvd, model)
    assert weight(model) == pytest.approx(0.2 * hvd.size(), abs=1e-6)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("eager", [False, True])
def test_two_passes_per_update(hvd, eager):
    model = linear()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    model.compile(optimizer, "mse", run_eagerly=eager)
    fit(hvd, model, rows=4)  # two windows: the sum of two equal gradients -2 N, then of 2 (0.4 N - N)
    assert int(optimizer.iterations) == 2
    assert weight(model) == pytest.approx(0.4 * hvd.size() + 0.24 * hvd.size(), abs=1e-5)


@pytest.mark.ranks(2)
def test_two_passes_averaged(hvd):
    model = linear()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    model.compile(optimizer, "mse")
    fit(hvd, model, rows=2)
    assert weight(model) == pytest.approx(0.4, abs=1e-6)


def test_config_gives_a_wrapped_optimizer(hvd):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.25))
    again = type(optimizer).from_config(optimizer.get_config())
    assert float(again.learning_rate) == 0.25
    assert type(optimizer).__name__ == "Adam" and isinstance(optimizer, keras.optimizers.Adam)
    model = linear()
    model.compile(again, "mse")
    fit(hvd, model)
    assert weight(model) == pytest.approx(0.25, abs=1e-4)  # Adam's first step is its learning rate
