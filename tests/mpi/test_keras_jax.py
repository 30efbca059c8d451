"""What is peculiar to Keras' jax backend: steps that XLA has compiled, with the exchange within; values by hand."""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras")
if keras.backend.backend() != "jax":
    pytest.skip("needs KERAS_BACKEND=jax", allow_module_level=True)
import jax  # noqa: E402


@pytest.mark.ranks(2, 3)
def test_the_step_is_compiled_and_traced_once(hvd):
    """Rank r: x = 1, y = 2 r + 1, rate 0.1: w comes nearer to N by a fifth in each of 3 steps."""
    traced = []

    class Counting(keras.layers.Dense):
        def call(self, inputs, training=False):
            traced.append(isinstance(inputs, jax.core.Tracer))
            return super().call(inputs)

    layer = Counting(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    assert model.jit_compile
    traced.clear()
    x, y = np.ones((3, 1), "float32"), np.full((3, 1), 2.0 * hvd.rank() + 1, "float32")
    model.fit(x[:1], y[:1], batch_size=1, verbose=0)
    assert traced and all(traced)  # by Keras, which builds the model, and by the step
    traced.clear()
    model.fit(x[1:], y[1:], batch_size=1, shuffle=False, verbose=0)
    assert not traced
    np.testing.assert_allclose(model.get_weights()[0], [[hvd.size() * (1 - 0.8**3)]], rtol=1e-5)


@pytest.mark.ranks(2)
def test_a_gradient_that_a_traced_step_cannot_return_is_named(hvd):
    a, b = keras.Variable([0.0], name="a"), keras.Variable([0.0], name="b")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([a, b])
    slots = [variable.value for variable in optimizer.variables]

    @jax.jit
    def step(x):
        return optimizer.stateless_apply(slots, [x, None], [a.value, b.value])

    @jax.jit
    def step_of_rank_0(x):
        return optimizer.stateless_apply(slots, [x, x], [a.value, b.value])

    one = jax.numpy.ones(1)
    (after, _), _ = step(one)
    assert float(after[0]) == -1.0
    if hvd.rank() == 0:
        new, _ = step_of_rank_0(one)
        assert [float(value[0]) for value in new] == [-1.0, -0.5]
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match="another rank has a gradient for b"):
            jax.block_until_ready(step(one))


@pytest.mark.ranks(1)
def test_a_model_over_several_devices_of_one_process_is_refused(hvd):
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=jax.devices()[:1]))
    try:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        with pytest.raises(ValueError, match="set_distribution"):
            optimizer.apply([jax.numpy.ones(1)], [keras.Variable([0.0])])
    finally:
        keras.distribution.set_distribution(None)
