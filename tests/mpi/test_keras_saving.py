"""What compression left unsent, in saved models, with values by hand."""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras")


def pair(hvd, **options):
    """Two weights; the target is far above, so the gradient is -x, of which topk(0.5) sends the larger element."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options), "mae")
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("saved", ["by each rank", "by all together"])
def test_what_compression_left_unsent_is_saved_with_the_model(hvd, tmp_path, saved):
    """Rank r's gradient is (3, 2 (r + 1)): rank 0 sends 3 and keeps (0, 2), rank 1 sends 4 and keeps (3, 0)."""
    topk = hvd.Compression.topk(0.5)
    x = np.array([[3.0, 2.0 * (hvd.rank() + 1)]], "float32")
    model = pair(hvd, compression=topk)
    model.fit(x, np.full((1, 1), 1e3), verbose=0)
    np.testing.assert_allclose(model.get_weights()[0][:, 0], [1.5, 2.0])
    path = tmp_path / "model.keras"
    if saved == "by each rank":
        model.save(path)
        loaded = hvd.load_model(path, compression=topk)
    else:
        hvd.save_model(model, path)
        assert path.exists() == (hvd.rank() == 0)
        loaded = hvd.load_model(path, compression=topk, root_rank=0)
    for trained in (model, loaded):  # with what is left, rank 0 has (3, 4) and rank 1 (6, 4)
        trained.fit(x, np.full((1, 1), 1e3), verbose=0)
        np.testing.assert_allclose(trained.get_weights()[0][:, 0], [1.5 + 3.0, 2.0 + 2.0])
    plain = keras.models.load_model(path) if path.exists() else None
    assert plain is None or type(plain.optimizer) is type(keras.optimizers.SGD(0.1))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("known, expected", [([0, 1], [1.5, 1.0]), ([0], None)])
def test_at_another_number_of_ranks_it_is_the_mean_where_all_is_known(hvd, tmp_path, known, expected):
    from horo_lite.keras import compressor_states

    arrays = [np.array([0.0, 2.0], "float32"), np.array([3.0, 0.0], "float32")]
    by_rank = {rank: {"dense/kernel": {"residual": arrays[rank], "draws": np.array(7)}} for rank in known}
    compressor_states.write(tmp_path, by_rank, size=2)
    state = compressor_states.read_folder(tmp_path)["dense/kernel"]
    assert state["draws"] == 7
    assert expected == (state["residual"].tolist() if "residual" in state else None)
