"""``horo_lite.run``: a function on several ranks."""

from __future__ import annotations

import pytest

import horo_lite


@pytest.mark.openmpi
def test_a_function_returns_each_ranks_result(capfd):
    def work(scale, offset=0):
        import numpy as np

        import horo_lite as hvd

        hvd.init()
        return scale * hvd.rank() + offset, float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0])

    assert horo_lite.run(work, (10,), {"offset": 5}, np=2, timeout_s=60) == [(5, 2.0), (15, 2.0)]
    assert "Warning" not in capfd.readouterr().err


def test_a_function_that_fails_on_one_rank(capfd):
    def work():
        import horo_lite as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise ValueError("not here")
        hvd.barrier()

    with pytest.raises(horo_lite.HorovodInternalError, match="np=2"):
        horo_lite.run(work, np=2, timeout_s=60)
    assert "[rank 1] ValueError: not here" in capfd.readouterr().err
