"""Horovod's elastic names in a world of fixed size: training goes on from the last commit.

One rule as in test_keras_optimizer: each step brings w nearer to N by a fifth, so after n steps w = N (1 - 0.8 ** n).
"""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras")


def linear(hvd):
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), dense])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    return model


def weight(model):
    return float(np.ravel(model.get_weights()[0])[0])


class FailOnce(keras.callbacks.Callback):
    """Every rank fails in the second batch of the second epoch, as when an operation has failed on all."""

    def __init__(self, state, error):
        super().__init__()
        self._state = state
        self._error = error
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        place = (self._state.epoch, self._state.batch)
        if place == (1, 1) and place not in self.seen:
            self.seen.append(place)
            self.model.layers[0].kernel.assign([[99.0]])  # no commit has seen this
            raise self._error("an operation failed")
        self.seen.append(place)


@pytest.mark.ranks(1, 2)
def test_fit_goes_on_from_the_last_commit(hvd):
    model = linear(hvd)
    model.layers[0].kernel.assign([[float(hvd.rank())]])  # rank 0's is 0, and counts
    state = hvd.elastic.KerasState(model, epoch=0, batch=0, note=f"rank {hvd.rank()}")
    resets = []
    state.register_reset_callbacks([lambda: resets.append(weight(model))])
    fail = FailOnce(state, hvd.HorovodInternalError)
    x, y = np.ones((2, 1), "float32"), np.full((2, 1), 2.0 * hvd.rank() + 1, "float32")
    ranks = hvd.size()

    @hvd.elastic.run
    def train(state):
        callbacks = [
            fail,
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state),
        ]
        while state.epoch < 2:
            steps = 2 - state.batch
            state.model.fit(x, y, batch_size=1, steps_per_epoch=steps, verbose=0, callbacks=callbacks)
        return "done"

    assert train(state) == "done"
    assert fail.seen == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 1)]
    assert resets == [pytest.approx(ranks * (1 - 0.8**3), rel=1e-5)]
    assert weight(model) == pytest.approx(ranks * (1 - 0.8**4), rel=1e-5)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 4
    assert (state.epoch, state.batch, state.note) == (2, 0, "rank 0")


@pytest.mark.ranks(1, 2)
def test_commits_every_so_many_batches(hvd):
    commits = []

    class Counting(hvd.elastic.KerasState):
        def commit(self):
            commits.append(self.batch)
            super().commit()

    state = Counting(linear(hvd), batch=0)
    x = np.ones((5, 1), "float32")
    state.model.fit(
        x, x, batch_size=1, verbose=0,
        callbacks=[hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.CommitStateCallback(state, 2)],
    )
    assert commits == [2, 4, 0]
