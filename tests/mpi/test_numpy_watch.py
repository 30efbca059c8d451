"""The stall watch's own faults do not keep a job from going on and ending."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest


@pytest.fixture
def failure():
    """Set once the watch has said that it failed."""
    said = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record):
            if "the stall watch has failed" in record.getMessage():
                said.set()

    listener = Listener()
    logging.getLogger("horo_lite").addHandler(listener)
    yield said
    logging.getLogger("horo_lite").removeHandler(listener)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("broken", [0, 1])
def test_a_watch_that_fails_on_one_rank_does_not_keep_the_others_from_shutting_down(hvd, failure, broken):
    if hvd.rank() == broken:

        def pending():
            raise ValueError("broken on purpose")

        hvd.global_process_set.member().lanes[0].pending = pending
        assert failure.wait(20)
    assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
