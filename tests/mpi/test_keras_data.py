"""Each rank's part of the data."""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras")


class Batches(keras.utils.PyDataset):
    """Batches of the number of the batch, twice."""

    def __init__(self, count):
        super().__init__()
        self.count = count
        self.epochs = 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return np.full((2, 1), index, "float32"), np.ones((2, 1), "float32")

    def on_epoch_end(self):
        self.epochs += 1


def test_batches_go_round_and_all_ranks_have_equally_many(hvd):
    part = hvd.data.shard(Batches(3 * hvd.size() - 1))
    assert [float(part[index][0][0, 0]) for index in range(len(part))] == [hvd.rank(), hvd.size() + hvd.rank()]
    assert hvd.data.check_shards(part)


@pytest.mark.ranks(1, 2)
def test_fit_on_a_part(hvd):
    """w = 0, rate 0.1: rank r sees x = r, then x = N + r. The gradient is -2 x (1 - w x)."""
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), dense])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    whole = Batches(2 * hvd.size())
    model.fit(hvd.data.shard(whole), verbose=0, shuffle=False)
    w = 0.0
    for xs in np.split(np.arange(2.0 * hvd.size()), 2):
        w += 0.1 * np.mean(2 * xs * (1 - w * xs))
    np.testing.assert_allclose(model.get_weights()[0], [[w]], rtol=1e-5)
    assert whole.epochs  # Keras tells the whole data set of the end of an epoch, once or twice


@pytest.mark.ranks(2, 3)
def test_parts_that_do_not_fit_together_are_named(hvd, caplog):
    assert not hvd.data.check_shards(Batches(3))
    assert "rank 1 begins with the same batch as rank 0" in caplog.text
    caplog.clear()
    arrays = [np.full((1,), float(hvd.rank()))] * (hvd.rank() + 1)
    assert not hvd.data.check_shards(arrays)
    assert "rank 0 1, rank 1 2" in caplog.text


@pytest.mark.ranks(2, 3)
def test_a_dataset_of_tensorflow(hvd):
    if keras.backend.backend() != "tensorflow":
        pytest.skip("its element is a tensor of TensorFlow")
    tf = pytest.importorskip("tensorflow")
    part = hvd.data.shard(tf.data.Dataset.range(2 * hvd.size() + 1))
    assert [int(element) for element in part] == [hvd.rank(), hvd.size() + hvd.rank()]
    assert hvd.data.check_shards(part)


@pytest.mark.ranks(1)
def test_what_cannot_be_divided_is_named(hvd):
    with pytest.raises(TypeError, match="list"):
        hvd.data.shard([1, 2])
