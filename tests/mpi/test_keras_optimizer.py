"""DistributedOptimizer in fit: one rule, w = 0, x = 1, target 2 * rank + 1, mean squared error, SGD(0.1).

The gradient on rank r is -2 (2 r + 1); the mean over N ranks is -2 N, so one step gives w = 0.2 N.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest

keras = pytest.importorskip("keras")


BACKEND = keras.backend.backend()


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


@pytest.mark.limit(300)  # torch compiles by a C++ compiler
@pytest.mark.parametrize("how", ["eager", "auto", "jit"])
def test_one_batch_of_fit(hvd, how):
    if how == "jit" and BACKEND == "torch" and shutil.which("c++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
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
    assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == 2
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


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("eager", [False, True])
def test_accumulation_by_keras_is_reduced_once_per_update(hvd, eager):
    """Windows of two equal gradients: their mean over passes and ranks, -2 N and then 2 (0.2 N - N)."""
    model = linear()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    model.compile(optimizer, "mse", run_eagerly=eager)
    fit(hvd, model, rows=2)
    before = hvd.wire_stats()
    fit(hvd, model, rows=2)
    after = hvd.wire_stats()
    assert weight(model) == pytest.approx(0.36 * hvd.size(), abs=1e-6)
    plain = linear()
    plain.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse", run_eagerly=eager)
    fit(hvd, plain, rows=2)
    fit(hvd, plain, rows=2)
    counted = int(keras.ops.convert_to_numpy(plain.optimizer.iterations))
    assert counted in (2, 4)  # updates; until Keras 3.4 passes, each of which it also clips, and so we reduce
    assert keras.ops.convert_to_numpy(optimizer.iterations) == counted
    assert after.dense_bytes - before.dense_bytes == 4 * counted // 2  # one float32 where updates count


@pytest.mark.ranks(2)
def test_accumulation_by_keras_where_one_rank_lacks_a_gradient(hvd):
    a, b, c = (keras.Variable([0.0], name=name) for name in "abc")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2, weight_decay=0.5))
    c.assign([2.0])
    for value in (1.0, 3.0):  # their mean is 2, and b's over the ranks 1
        gradient = keras.ops.convert_to_tensor([value])
        optimizer.apply([gradient, gradient if hvd.rank() else None, None], [a, b, c])
    assert [float(v[0]) for v in (a, b, c)] == [-2.0, -1.0, 2.0]  # nobody has a gradient for c: it does not decay


def test_config_gives_a_wrapped_optimizer(hvd):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.25))
    again = type(optimizer).from_config(optimizer.get_config())
    assert float(keras.ops.convert_to_numpy(again.learning_rate)) == 0.25
    assert type(optimizer).__name__ == "Adam" and isinstance(optimizer, keras.optimizers.Adam)
    model = linear()
    model.compile(again, "mse")
    fit(hvd, model)
    assert weight(model) == pytest.approx(0.25, abs=1e-4)  # Adam's first step is its learning rate


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1, momentum=0.5),
    "lion": lambda: keras.optimizers.Lion(0.1),
    "adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.5),
    "global clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.5),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_one_process_on_the_mean_gradient(hvd, name):
    shapes = [(3, 2), (2,), ()]
    numbers = np.random.default_rng(7)
    gradients = numbers.normal(size=(4, hvd.size(), 9)).astype("float32")  # (steps, ranks, elements)

    def split(flat):
        parts = [flat[0:6], flat[6:8], flat[8:9]]
        return [keras.ops.convert_to_tensor(p.reshape(s)) for p, s in zip(parts, shapes, strict=True)]

    def variables():
        return [keras.Variable(np.full(s, 0.5, "float32"), name=f"v{i}") for i, s in enumerate(shapes)]

    own, reference = variables(), variables()
    distributed, plain = hvd.DistributedOptimizer(OPTIMIZERS[name]()), OPTIMIZERS[name]()
    for step in gradients:
        distributed.apply(split(step[hvd.rank()]), own)
        plain.apply(split(step.mean(0)), reference)
    pairs = zip([*own, *distributed.variables], [*reference, *plain.variables], strict=True)
    for mine, wanted in pairs:
        np.testing.assert_allclose(np.asarray(mine), np.asarray(wanted), rtol=1e-5, atol=1e-6)
    bits = [np.asarray(variable).tobytes() for variable in own]
    assert all(other == bits for other in hvd.allgather_object(bits))


def network():
    """Two layers, with the same weights wherever it is called."""
    first = keras.layers.Dense(5, activation="tanh", kernel_initializer=keras.initializers.GlorotUniform(1))
    second = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2))
    return keras.Sequential([keras.Input((3,)), first, second])


def joined_batches(hvd, steps, rows):
    """What all ranks see, step by step, and the part of this one."""
    x = np.random.default_rng(3).normal(size=(steps, rows * hvd.size(), 3)).astype("float32")
    y = x.sum(2, keepdims=True)
    own = slice(rows * hvd.rank(), rows * (hvd.rank() + 1))
    return (x.reshape(-1, 3), y.reshape(-1, 1)), (x[:, own].reshape(-1, 3), y[:, own].reshape(-1, 1))


def assert_same_training(hvd, distributed, alone):
    for mine, wanted in zip(distributed.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, wanted, atol=1e-5)
    bits = [weights.tobytes() for weights in distributed.get_weights()]
    assert all(other == bits for other in hvd.allgather_object(bits))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_fit_equals_one_process_on_the_joined_batch(hvd, name):
    whole, own = joined_batches(hvd, steps=4, rows=2)
    alone, distributed = network(), network()
    alone.compile(OPTIMIZERS[name](), "mse")
    distributed.compile(hvd.DistributedOptimizer(OPTIMIZERS[name]()), "mse")
    alone.fit(*whole, batch_size=2 * hvd.size(), epochs=2, shuffle=False, verbose=0)
    distributed.fit(*own, batch_size=2, epochs=2, shuffle=False, verbose=0)
    assert_same_training(hvd, distributed, alone)


def loop_on_tensorflow(model, optimizer, batches):
    import tensorflow as tf

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    for x, y in batches:
        step(x, y)


def loop_on_torch(model, optimizer, batches):
    import torch

    for x, y in batches:
        model.zero_grad()
        ((model(x, training=True) - torch.as_tensor(y)) ** 2).mean().backward()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)


def loop_on_jax(model, optimizer, batches):
    import jax

    optimizer.build(model.trainable_variables)

    def loss(trainable, others, x, y):
        predicted, _ = model.stateless_call(trainable, others, x, training=True)
        return ((predicted - y) ** 2).mean()

    @jax.jit
    def step(trainable, others, slots, x, y):
        return optimizer.stateless_apply(slots, jax.grad(loss)(trainable, others, x, y), trainable)

    trainable, others, slots = (
        [v.value for v in variables]
        for variables in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    )
    for x, y in batches:
        trainable, slots = step(trainable, others, slots, x, y)
    for variable, value in zip([*model.trainable_variables, *optimizer.variables], [*trainable, *slots], strict=True):
        variable.assign(value)


@pytest.mark.ranks(1, 2, 3)
def test_a_loop_of_ones_own_equals_one_process_on_the_joined_batch(hvd):
    loop = {"tensorflow": loop_on_tensorflow, "torch": loop_on_torch, "jax": loop_on_jax}[BACKEND]
    whole, own = joined_batches(hvd, steps=4, rows=2)
    models = network(), network()
    optimizers = keras.optimizers.Adam(0.1), hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))
    for model, optimizer, (x, y) in zip(models, optimizers, (whole, own), strict=True):
        loop(model, optimizer, list(zip(np.split(x, 4), np.split(y, 4), strict=True)))
    assert_same_training(hvd, models[1], models[0])


def stepper(optimizer, variables, graph=False):
    """What applies a list of gradients as Keras' trainer does; on jax a LossScaleOptimizer has no other way."""
    optimizer.build(variables)
    if BACKEND == "jax":
        import jax

        stateless = jax.jit(optimizer.stateless_apply) if graph else optimizer.stateless_apply

        def step(gradients):
            after = stateless([v.value for v in optimizer.variables], gradients, [v.value for v in variables])
            own = [*variables, *optimizer.variables]
            for variable, value in zip(own, keras.tree.flatten(after), strict=True):
                variable.assign(value)

        return step
    if not graph:
        return lambda gradients: optimizer.apply(gradients, variables)
    if BACKEND == "torch":
        pytest.skip("there are no graphs")
    import tensorflow as tf

    return tf.function(lambda gradients: optimizer.apply(gradients, variables))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("order", ["scaled inside", "scaled outside"])
@pytest.mark.parametrize("graph", [False, True])
def test_loss_scaling_skips_on_all_ranks(hvd, order, graph):
    plain = keras.optimizers.SGD(1.0)
    scaled = keras.optimizers.LossScaleOptimizer
    if order == "scaled inside":
        optimizer = hvd.DistributedOptimizer(scaled(plain, initial_scale=4.0))
    else:
        optimizer = scaled(hvd.DistributedOptimizer(plain), initial_scale=4.0)
    w = keras.Variable([0.0])
    step = stepper(optimizer, [w], graph)
    last = hvd.rank() == hvd.size() - 1
    step([keras.ops.convert_to_tensor([np.inf if last else 1.0])])
    assert float(w[0]) == 0.0 and float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)) == 2.0
    step([keras.ops.convert_to_tensor([float(2 * hvd.rank())])])  # mean N - 1, divided by the scale 2
    assert float(w[0]) == pytest.approx(-(hvd.size() - 1) / 2)
    assert int(keras.ops.convert_to_numpy(optimizer.inner_optimizer.iterations)) == 1


@pytest.mark.ranks(2)
def test_mixed_precision_in_fit(hvd):
    """Keras itself puts loss scaling around the wrapped optimizer."""
    model = linear(dtype="mixed_float16")
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    fit(hvd, model)
    assert weight(model) == pytest.approx(0.4, abs=1e-3)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("arguments", [{}, {"sparse_as_dense": True}, {"groups": 2}], ids=str)
@pytest.mark.parametrize("passes", [1, 2])
def test_embedding(hvd, arguments, passes):
    """Rank r looks up rows r and 0; every looked-up element has gradient 1."""
    table = keras.layers.Embedding(4, 2, embeddings_initializer="zeros")
    model = keras.Sequential([keras.Input((2,), dtype="int32"), table])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=passes, **arguments)
    model.compile(optimizer, loss=lambda y, p: keras.ops.sum(p, axis=(1, 2)))
    x = np.array([[hvd.rank(), 0]] * passes)
    model.fit(x, np.zeros((passes, 1)), batch_size=1, verbose=0)
    expected = np.zeros((4, 2))
    for rank in range(hvd.size()):
        expected[[rank]] -= 1 / hvd.size()
        expected[[0]] -= 1 / hvd.size()
    np.testing.assert_allclose(model.get_weights()[0], expected * passes, atol=1e-6)


@pytest.mark.ranks(2)
def test_a_window_with_nan_recovers(hvd):
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0), backward_passes_per_step=2
    )
    w = keras.Variable([0.0])
    step = stepper(optimizer, [w])
    for gradient in [np.nan if hvd.rank() else 1.0, 1.0, 2.0, 2.0]:
        step([keras.ops.convert_to_tensor([gradient])])
    assert float(w[0]) == -4.0  # the second window: 4, at scale 1 after the skip


@pytest.mark.ranks(2, 3)
def test_gradients_that_some_or_all_ranks_lack(hvd):
    a, b, c = (keras.Variable([0.0], name=name) for name in "abc")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    one = keras.ops.convert_to_tensor([1.0])
    for _ in range(2):
        optimizer.apply([one, one if hvd.rank() == 0 else None, None], [a, b, c])
    assert float(a[0]) == -2.0 and float(c[0]) == 0.0
    assert float(b[0]) == pytest.approx(-2.0 / hvd.size())


@pytest.mark.ranks(2)
def test_local_variables_and_layers(hvd):
    a, b = keras.Variable([0.0], name="a"), keras.Variable([0.0], name="b")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.register_local_var(b)
    gradient = keras.ops.convert_to_tensor([hvd.rank() + 1.0])
    optimizer.apply([gradient, gradient], [a, b])
    assert float(a[0]) == -1.5 and float(b[0]) == -(hvd.rank() + 1) / 2

    first, second = keras.layers.Dense(1, use_bias=False), keras.layers.Dense(1, use_bias=False)
    for layer in (first, second):
        layer.build((1, 1))
        layer.kernel.assign([[0.0]])
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(1.0), local_layers=[second], scale_local_gradients=False
    )
    matrix = keras.ops.reshape(gradient, (1, 1))
    optimizer.apply([matrix, matrix], [first.kernel, second.kernel])
    assert float(first.kernel[0, 0]) == -1.5 and float(second.kernel[0, 0]) == -(hvd.rank() + 1.0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("scaled", [False, True])
def test_a_local_layer_with_sparse_gradients(hvd, scaled):
    table = keras.layers.Embedding(3, 2, embeddings_initializer="zeros")
    model = keras.Sequential([keras.Input((1,), dtype="int32"), table])
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(1.0), local_layers=[table], scale_local_gradients=scaled
    )
    model.compile(optimizer, loss=lambda y, p: keras.ops.sum(p, axis=(1, 2)))
    model.fit(np.array([[hvd.rank()]]), np.zeros((1, 1)), verbose=0)
    expected = np.zeros((3, 2))
    expected[hvd.rank()] = -0.5 if scaled else -1.0
    np.testing.assert_allclose(model.get_weights()[0], expected)


@pytest.mark.ranks(2)
def test_two_models_of_the_same_names(hvd):
    models = [linear(), linear()]
    optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)) for _ in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        model.compile(optimizer, "mse")
    for _ in range(2):
        for model in models:
            fit(hvd, model)
    assert [weight(model) for model in models] == [pytest.approx(0.72, abs=1e-6)] * 2


@pytest.mark.ranks(2, 3)
def test_different_models_raise_on_every_rank(hvd):
    shapes = [(2,), (3,)] if hvd.rank() == 0 else [(2,), (4,)]
    variables = [keras.Variable(np.zeros(s, "float32"), name=f"v{s[0] % 2}") for s in shapes]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(hvd.DisagreementError, match="v"):
        optimizer.apply([keras.ops.ones(s) for s in shapes], variables)


@pytest.mark.ranks(2)
def test_compression(hvd):
    w = keras.Variable([0.0, 0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=hvd.Compression.fp16)
    optimizer.apply([keras.ops.convert_to_tensor([40000.0, hvd.rank() * 1.0])], [w])
    np.testing.assert_allclose(np.asarray(w), [-40000.0, -0.5])
    own = keras.Variable([0.0, 0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=hvd.Compression.topk(0.5))
    for _ in range(2):  # the element left out comes with the next step
        optimizer.apply([keras.ops.convert_to_tensor([3.0, 2.0])], [own])
    np.testing.assert_allclose(np.asarray(own), [-3.0, -4.0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("graph", [False, True])
def test_a_compressor_of_ones_own_in_every_wrapper(hvd, graph):
    """It sees the backend's tensors; on jax numpy's arrays, which Keras' operations take as well."""

    def is_given(tensor):
        return isinstance(tensor, np.ndarray) if BACKEND == "jax" else keras.ops.is_tensor(tensor)

    class Halved:
        @staticmethod
        def compress(tensor):
            assert is_given(tensor)
            return keras.ops.cast(tensor / 2, "float16"), "float32"

        @staticmethod
        def decompress(tensor, ctx):
            assert is_given(tensor)
            return keras.ops.cast(tensor, ctx) * 2

    C = hvd.Compression
    for own in (Halved, C.min_size(Halved, 1), C.warmup(C.with_feedback(Halved), 0), C.per_layer({"*": Halved})):
        w = keras.Variable([0.0, 0.0])
        step = stepper(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=own), [w], graph)
        step([keras.ops.convert_to_tensor([40000.0, hvd.rank() * 1.0])])
        np.testing.assert_allclose(np.asarray(w), [-40000.0, -0.5])


@pytest.mark.ranks(3)
def test_process_set(hvd):
    pair = hvd.ProcessSet([0, 1])
    hvd.shutdown()
    hvd.init(process_sets=[pair])
    w = keras.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=pair)
    optimizer.apply([keras.ops.convert_to_tensor([hvd.rank() + 1.0])], [w])
    assert float(w[0]) == (-1.5 if hvd.rank() < 2 else -3.0)
    hvd.shutdown()
    hvd.init()


@pytest.mark.ranks(1)
def test_wrong_arguments_are_named(hvd):
    sgd = keras.optimizers.SGD(0.1)
    for arguments, error, text in (
        ({"op": hvd.Max}, ValueError, "Average or Sum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, ValueError, "Average only"),
        ({"backward_passes_per_step": 0}, ValueError, "1 or more"),
        ({"groups": "all"}, ValueError, "groups"),
        ({"compression": 5}, TypeError, "Compression"),
    ):
        with pytest.raises(error, match=text):
            hvd.DistributedOptimizer(sgd, **arguments).apply([keras.ops.ones(2)], [keras.Variable([0.0, 0.0])])
    with pytest.raises(TypeError, match="optimizer"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd))
