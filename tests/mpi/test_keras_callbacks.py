"""Callbacks in fit, with values by hand."""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras")


def linear(optimizer, **compile_arguments):
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), dense])
    model.compile(optimizer, "mean_squared_error", **compile_arguments)
    return model


def fit(model, target, rows=1, **arguments):
    x, y = np.ones((rows, 1), np.float32), np.full((rows, 1), target, np.float32)
    return model.fit(x, y, batch_size=1, verbose=0, shuffle=False, **arguments)


class Rates(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(round(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)), 6))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    "multiplier, first, expected",
    [(lambda e: 0.1, 0, [0.8, 0.8, 0.08, 0.08]), (0.1, 0, [0.8, 0.8, 0.8, 0.08]), (lambda e: 0.1, 3, [0.08])],
    ids=["function", "constant", "resumed"],
)
def test_learning_rate_schedule(hvd, multiplier, first, expected):
    rates = Rates()
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.8, multiplier, start_epoch=2)
    model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.8)))
    history = fit(model, 1.0, epochs=4, initial_epoch=first, callbacks=[schedule, rates])
    assert rates.seen == expected
    np.testing.assert_allclose(history.history["lr"], expected, rtol=1e-5)


@pytest.mark.ranks(1, 2)
def test_warmup_ends_at_the_full_rate(hvd):
    rates, size = Rates(), hvd.size()
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2)
    model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.4)))
    fit(model, 1.0, rows=2, epochs=3, callbacks=[warmup, rates])
    batches = [0.5, 1.0, 1.5, 2.0]  # epochs done after each batch
    expected = [0.4 / size * (e * (size - 1) / 2 + 1) for e in batches] + [0.4, 0.4]
    np.testing.assert_allclose(rates.seen, expected, atol=1e-5)


@pytest.mark.ranks(1)
def test_momentum_is_scaled_with_the_rate(hvd):
    """Gradient 2 (w - 1). Rate 0.1: v = 0.2, w = 0.2. Rate 0.01: v = 0.5 * 0.02 + 0.016 = 0.026, w = 0.226."""
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda e: 0.1 if e else 1.0)
    model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5)))
    fit(model, 1.0, epochs=2, callbacks=[schedule])
    assert float(np.ravel(model.get_weights()[0])[0]) == pytest.approx(0.226, abs=1e-6)


def test_metrics_are_averaged_before_later_callbacks_see_them(hvd):
    """w stays 0, so the loss is (2 r + 1) ** 2 on rank r."""
    seen = []
    later = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"]))
    model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
    average = hvd.callbacks.MetricAverageCallback()
    history = fit(model, 2.0 * hvd.rank() + 1, callbacks=[average, later])
    expected = np.mean([(2.0 * r + 1) ** 2 for r in range(hvd.size())])
    np.testing.assert_allclose([*history.history["loss"], *seen], [expected, expected])


@pytest.mark.ranks(2, 3)
def test_metrics_weighted_by_samples(hvd):
    """Rank r has r + 1 rows of training data and 2 of validation data: the sums are over samples."""
    model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
    average = hvd.callbacks.MetricAverageCallback(weighted=True)
    target = 2.0 * hvd.rank() + 1
    rows = hvd.rank() + 1
    x, y = np.ones((rows, 1), np.float32), np.full((rows, 1), target, np.float32)
    validation = (np.ones((2, 1), np.float32), np.full((2, 1), target, np.float32))
    history = model.fit(x, y, batch_size=8, validation_data=validation, verbose=0, callbacks=[average])
    losses = [(2.0 * r + 1) ** 2 for r in range(hvd.size())]
    samples = [r + 1 for r in range(hvd.size())]
    np.testing.assert_allclose(history.history["loss"], [np.average(losses, weights=samples)])
    np.testing.assert_allclose(history.history["val_loss"], [np.mean(losses)])


@pytest.mark.ranks(2)
def test_a_metric_that_one_rank_lacks_is_named(hvd, caplog):
    model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
    validation = (np.ones((1, 1)), np.ones((1, 1))) if hvd.rank() == 0 else None
    with caplog.at_level("WARNING", "horo_lite"):
        history = fit(
            model, 2.0 * hvd.rank() + 1, validation_data=validation, callbacks=[hvd.callbacks.MetricAverageCallback()]
        )
    assert "val_loss is missing on rank 1" in caplog.text
    np.testing.assert_allclose(history.history["loss"], [5.0])


@pytest.mark.ranks(2, 3)
def test_ranks_stop_together(hvd):
    """Rank 0 wants to stop after the second epoch; the others never do."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = hvd.rank() == 0 and epoch == 1

    model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    history = fit(model, 1.0, epochs=5, callbacks=[Stop(), hvd.callbacks.EarlyStoppingAgreementCallback()])
    assert len(history.epoch) == 2


@pytest.mark.ranks(2, 3)
def test_broadcast_makes_all_ranks_equal_before_the_first_step(hvd):
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.layers.Dense(3)
            self.out = keras.layers.Dense(1)

        def call(self, x):
            return self.out(self.hidden(x))

    keras.utils.set_random_seed(100 + hvd.rank())
    model = Net()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, "mse")
    check = hvd.callbacks.ConsistencyCallback(1, optimizer_too=True)
    x = np.random.default_rng(hvd.rank()).normal(size=(4, 2)).astype("float32")
    model.fit(
        x, x[:, :1], batch_size=2, verbose=0, epochs=2,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), check],
    )
    own = [np.asarray(v) for v in [*model.get_weights(), *[v.numpy() for v in optimizer.variables]]]
    for mine, others in zip(own, zip(*hvd.allgather_object(own), strict=True), strict=True):
        for other in others:
            np.testing.assert_array_equal(mine, other)


@pytest.mark.ranks(2)
def test_weights_that_drift_apart_are_named(hvd):
    class Meddle(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if hvd.rank() == 1:
                self.model.layers[0].kernel.assign([[5.0]])

    model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    with pytest.raises(hvd.DisagreementError, match="kernel"):
        fit(model, 1.0, callbacks=[Meddle(), hvd.callbacks.ConsistencyCallback(1)])


@pytest.mark.ranks(2)
def test_ranks_with_different_numbers_of_batches(hvd):
    """Rank 0 has one batch and target 1, rank 1 two and 3. w: 0.4 by both, then 0.4 + 0.1 * 5.2 / 2 by rank 1 alone.

    The second epoch: 0.66 + 0.1 * (0.68 + 4.68) / 2 = 0.928, then 0.928 + 0.1 * 4.144 / 2.
    """
    model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    seen = []
    weights = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(float(model.get_weights()[0][0, 0])))
    average = hvd.callbacks.MetricAverageCallback()
    fit(
        model, 2.0 * hvd.rank() + 1, rows=hvd.rank() + 1, epochs=2,
        callbacks=[hvd.callbacks.JoinCallback(), average, weights],
    )
    np.testing.assert_allclose(seen, [0.66, 0.928 + 0.2072], rtol=1e-5)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 4


@pytest.mark.ranks(2, 3)
def test_layers_of_equal_shape_in_another_order_are_found_out(hvd):
    names = ["left", "right"] if hvd.rank() == 0 else ["right", "left"]
    layers = [keras.layers.Dense(1, use_bias=False, name=name) for name in names]
    model = keras.Sequential([keras.Input((1,)), *layers])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with pytest.raises(hvd.DisagreementError, match=r"left/kernel.*right/kernel"):
        hvd.broadcast_variables(model.weights, root_rank=0)
    with pytest.raises(hvd.DisagreementError, match="left/kernel"):
        fit(model, 1.0)


@pytest.mark.ranks(2)
def test_best_model_is_written_once(hvd, tmp_path):
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    with pytest.raises(ValueError, match="filepath"):
        fit(model, 1.0, callbacks=[best])
    best.filepath = str(tmp_path / "best.keras")
    fit(model, 1.0, epochs=2, callbacks=[best])
    assert (tmp_path / "best.keras").exists() == (hvd.rank() == 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_save_load_and_go_on(hvd, tmp_path, suffix):
    """SGD 0.1 with momentum 0.5: after loading, the velocity is as it was."""

    def make():
        return linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5)))

    unbroken = make()
    fit(unbroken, 2.0 * hvd.rank() + 1, epochs=3)
    model = make()
    fit(model, 2.0 * hvd.rank() + 1, epochs=2)
    path = tmp_path / f"model{suffix}"
    model.save(path)
    loaded = hvd.load_model(path)
    assert float(keras.ops.convert_to_numpy(loaded.optimizer.learning_rate)) == pytest.approx(0.1)
    fit(loaded, 2.0 * hvd.rank() + 1)
    np.testing.assert_allclose(loaded.get_weights()[0], unbroken.get_weights()[0], rtol=1e-6)
    plain = keras.models.load_model(path)  # without horo_lite
    assert type(plain.optimizer) is type(keras.optimizers.SGD(0.1))
    if hvd.rank() == 1:
        path.unlink()
    sent = hvd.load_model(path, root_rank=0)
    fit(sent, 2.0 * hvd.rank() + 1)
    np.testing.assert_allclose(sent.get_weights()[0], unbroken.get_weights()[0], rtol=1e-6)
    with pytest.raises(ValueError, match="root_rank"):
        hvd.load_model(tmp_path / "nothing.keras")


@pytest.mark.ranks(2)
def test_resume_where_only_rank_0_loads(hvd, tmp_path):
    """Rank 0 loads and the others start anew: the broadcast gives all the same weights, velocity and counter."""
    path = tmp_path / "model.keras"

    def make():
        return linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5)))

    unbroken = make()
    fit(unbroken, 2.0 * hvd.rank() + 1, epochs=3)
    model = make()
    fit(model, 2.0 * hvd.rank() + 1, epochs=2)
    model.save(path)
    resumed = hvd.load_model(path) if hvd.rank() == 0 else make()
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 1.0)
    fit(
        resumed, 2.0 * hvd.rank() + 1, initial_epoch=2, epochs=3,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), schedule],
    )
    np.testing.assert_allclose(resumed.get_weights()[0], unbroken.get_weights()[0], rtol=1e-6)
    assert int(keras.ops.convert_to_numpy(resumed.optimizer.iterations)) == 3
