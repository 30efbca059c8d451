"""Optimizers of legacy Keras (tf_keras), old and new: on rank r the gradient is r + 1, their mean (N + 1) / 2."""

from __future__ import annotations

import pytest

tf = pytest.importorskip("tensorflow")
tf_keras = pytest.importorskip("tf_keras")

KINDS = pytest.mark.parametrize("kind", ["new", "old"])


def sgd(kind):
    return (tf_keras.optimizers if kind == "new" else tf_keras.optimizers.legacy).SGD(1.0)


@pytest.mark.ranks(1, 2)
@KINDS
@pytest.mark.parametrize("graph", [False, True])
def test_apply_gradients(hvd, kind, graph):
    w = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(sgd(kind))
    assert isinstance(optimizer, type(sgd(kind)))

    def step():
        optimizer.apply_gradients([(tf.fill([1], hvd.rank() + 1.0), w)])

    step = tf.function(step) if graph else step
    for _ in range(2):
        step()
    assert float(w[0]) == -(hvd.size() + 1.0)
    assert int(optimizer.iterations.numpy()) == 2


@pytest.mark.ranks(1, 2)
@KINDS
def test_gradients_that_were_computed_by_the_optimizer_are_reduced_once(hvd, kind):
    w = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(sgd(kind), op=hvd.Sum)
    total = hvd.size() * (hvd.size() + 1) / 2
    with tf.GradientTape() as tape:
        loss = (hvd.rank() + 1.0) * w[0]
    compute = optimizer.compute_gradients if kind == "new" else optimizer._compute_gradients
    pairs = list(compute(loss, [w], tape=tape))
    assert float(pairs[0][0][0]) == total
    optimizer.apply_gradients(pairs)
    assert float(w[0]) == -total
    optimizer.minimize(lambda: (hvd.rank() + 1.0) * w[0], [w])
    assert float(w[0]) == -2 * total


@pytest.mark.ranks(2)
@KINDS
@pytest.mark.parametrize("graph", [False, True])
def test_two_passes_per_update(hvd, kind, graph):
    w = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(
        sgd(kind), backward_passes_per_step=2, average_aggregated_gradients=True
    )

    def step(value):
        optimizer.apply_gradients([(tf.fill([1], value * (hvd.rank() + 1.0)), w)])

    step = tf.function(step) if graph else step
    for value in (1.0, 3.0, 5.0, 5.0):  # means over passes 2 and 5, over ranks 3 and 7.5
        step(tf.constant(value))
    assert float(w[0]) == -10.5
    assert int(optimizer.iterations.numpy()) == 2


@pytest.mark.ranks(2)
def test_fit(hvd):
    dense = tf_keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", input_shape=(1,))
    model = tf_keras.Sequential([dense])
    model.compile(hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.1)), "mse")
    model.fit(tf.ones([1, 1]), tf.fill([1, 1], 2.0 * hvd.rank() + 1), verbose=0)
    assert float(model.get_weights()[0][0, 0]) == pytest.approx(0.4, abs=1e-6)


@pytest.mark.ranks(2)
@KINDS
def test_callbacks(hvd, kind):
    """Rank r starts at w = r, its target is 2 r + 1: gradients -2 and -4, of mean -3; then all have rank 0's weight."""
    callbacks = hvd.keras.callbacks
    start = tf_keras.initializers.Constant(float(hvd.rank()))
    layer = tf_keras.layers.Dense(1, use_bias=False, kernel_initializer=start)
    model = tf_keras.Sequential([tf_keras.Input((1,)), layer])
    optimizers = tf_keras.optimizers if kind == "new" else tf_keras.optimizers.legacy
    model.compile(hvd.DistributedOptimizer(optimizers.SGD(0.05, momentum=0.9)), "mse")
    history = model.fit(
        tf.ones((1, 1)), tf.fill((1, 1), 2.0 * hvd.rank() + 1), verbose=0,
        callbacks=[
            callbacks.BroadcastGlobalVariablesCallback(0), callbacks.MetricAverageCallback(),
            callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=1, steps_per_epoch=1),
        ],
    ).history
    assert float(layer.kernel[0, 0]) == pytest.approx(0.3)
    assert history["loss"] == [pytest.approx((1 + 4) / 2)]


def fresh_model(hvd, kind):
    layer = tf_keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = tf_keras.Sequential([tf_keras.Input((1,)), layer])
    optimizers = tf_keras.optimizers if kind == "new" else tf_keras.optimizers.legacy
    model.compile(hvd.DistributedOptimizer(optimizers.SGD(0.1, momentum=0.5)), "mse")
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "ending"), [("new", "keras"), ("new", "h5"), ("old", "h5")])
def test_load_model_wraps_again_and_keeps_slots(hvd, kind, ending, monkeypatch, tmp_path):
    monkeypatch.setattr(tf, "keras", tf_keras)  # as under TF_USE_LEGACY_KERAS=1
    model = fresh_model(hvd, kind)
    x, y = tf.ones((1, 1)), tf.fill((1, 1), 2.0 * hvd.rank() + 1)
    model.train_on_batch(x, y)  # gradients -2 and -6 at w = 0, of mean -4: w = 0.4
    path = f"{tmp_path}/model.{ending}"
    model.save(path)
    loaded = hvd.keras.load_model(path)
    loaded.train_on_batch(x, y)  # mean -3.2; momentum 0.5 * 0.4 + 0.32
    assert float(loaded.get_weights()[0][0, 0]) == pytest.approx(0.4 + 0.2 + 0.32)


@pytest.mark.ranks(2)
@KINDS
def test_every_callback_is_called(hvd, kind, tmp_path):
    callbacks, elastic = hvd.keras.callbacks, hvd.keras.elastic
    model = fresh_model(hvd, kind)
    state = elastic.KerasState(model, epoch=0, batch=0)
    best = callbacks.BestModelCheckpoint(monitor="loss", save_weights_only=True, filepath=f"{tmp_path}/best.weights.h5")
    given = [
        best, callbacks.ConsistencyCallback(optimizer_too=True), callbacks.EarlyStoppingAgreementCallback(),
        callbacks.JoinCallback(), elastic.CommitStateCallback(state),
        elastic.UpdateBatchStateCallback(state), elastic.UpdateEpochStateCallback(state),
    ]
    model.fit(tf.ones((2, 1)), tf.ones((2, 1)), batch_size=1, epochs=2, verbose=0, callbacks=given)
    assert state.epoch == 2
    trained = model.get_weights()[0][0, 0]
    model.set_weights([tf.fill((1, 1), 7.0)])
    state.restore()
    assert model.get_weights()[0][0, 0] == trained != 0
