"""XLA cannot call back, so training goes on without it and says so; values as in test_keras_optimizer."""

from __future__ import annotations

import types

import numpy as np
import pytest

keras = pytest.importorskip("keras")
if keras.backend.backend() != "tensorflow":
    pytest.skip("it is TensorFlow that cannot call back from what XLA has compiled", allow_module_level=True)
tf = pytest.importorskip("tensorflow")


def linear(hvd, optimizer=None, **compile_arguments):
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), dense])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)) if optimizer is None else optimizer
    model.compile(optimizer, "mse", **compile_arguments)
    return model


def fit(hvd, model):
    model.fit(np.ones((1, 1), "float32"), np.full((1, 1), 2.0 * hvd.rank() + 1), verbose=0)
    return float(np.ravel(model.get_weights()[0])[0])


@pytest.mark.ranks(1, 2)
def test_auto_is_false_on_a_device_for_which_keras_would_choose_xla(hvd, monkeypatch, caplog):
    hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: [types.SimpleNamespace(device_type="GPU")])
    assert linear(hvd, keras.optimizers.SGD(0.1)).jit_compile  # so it is chosen, but for the exchange
    model = linear(hvd)
    assert not model.jit_compile
    assert fit(hvd, model) == pytest.approx(0.2 * hvd.size(), abs=1e-6)
    assert not caplog.records  # nobody asked for XLA


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    "how", ["argument", "decision", "attribute", "compiled again", "optimizer given later", "loss scaling"]
)
def test_xla_that_is_asked_for_is_refused_with_a_reason(hvd, how, monkeypatch, caplog):
    plain = keras.optimizers.SGD(0.1)
    if how == "argument":
        model = linear(hvd, jit_compile=True)
    elif how == "decision":
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        monkeypatch.setattr(keras.Model, "_resolve_auto_jit_compile", lambda model: True)
        model = linear(hvd, jit_compile="auto")
    elif how == "attribute":
        model = linear(hvd)
        model.jit_compile = True
    elif how == "compiled again":
        model = linear(hvd, plain, jit_compile=True)
        model.compile(hvd.DistributedOptimizer(plain), "mse", jit_compile=True)
    elif how == "optimizer given later":
        model = linear(hvd, plain, jit_compile=True)
        model.optimizer = hvd.DistributedOptimizer(plain)
    else:
        scaled = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(plain), initial_scale=2.0)
        model = linear(hvd, scaled, jit_compile=True)
    assert fit(hvd, model) == pytest.approx(0.2 * hvd.size(), abs=1e-6)
    assert model.jit_compile is False
    said = [record.getMessage() for record in caplog.records if "XLA" in record.getMessage()]
    assert len(said) == (hvd.rank() == 0)
    assert all("jit_compile=False" in text and model.name in text for text in said)


@pytest.mark.ranks(2)
def test_xla_computes_a_layer_and_not_the_exchange(hvd):
    class Compiled(keras.layers.Dense):
        call = tf.function(keras.layers.Dense.call, jit_compile=True)

    layer = Compiled(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    assert fit(hvd, model) == pytest.approx(0.2 * hvd.size(), abs=1e-6)


@pytest.mark.ranks(2)
def test_clusters_that_xla_chooses_leave_out_the_exchange(hvd):
    tf.config.optimizer.set_jit("autoclustering")
    try:
        assert fit(hvd, linear(hvd)) == pytest.approx(0.2 * hvd.size(), abs=1e-6)
    finally:
        tf.config.optimizer.set_jit(False)


@pytest.mark.ranks(2)
def test_a_compiled_function_that_calls_one_with_an_exchange_says_what_to_set(hvd):
    w = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([w])

    @tf.function
    def inner():
        optimizer.apply([tf.ones([1])], [w])

    @tf.function(jit_compile=True)
    def outer():
        inner()

    with pytest.raises(Exception, match="jit_compile=False"):
        outer()
    inner()
    assert float(w[0]) == -1.0
