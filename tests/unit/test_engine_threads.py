"""The engine with its communication thread: the whole framework-free API on several ranks, a thread each."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from horo_lite import functions as hvd
from horo_lite.config import Config
from horo_lite.engine import Engine, Handle
from horo_lite.errors import ShutDownError
from horo_lite.gradients import GradientBuckets
from tests.unit.worlds import Threads


@pytest.fixture(params=[1, 2, 3])
def ranks(request, monkeypatch):
    threads = Threads(monkeypatch, request.param, Config(shared_memory=False))
    yield threads
    threads.close()


def test_collectives(ranks):
    size = ranks.size

    def body(rank):
        for _ in range(3):
            assert hvd.allreduce(np.array([rank + 1.0]), op=hvd.Sum, name="sum").tolist() == [size * (size + 1) / 2]
            handle = hvd.allgather_async(np.full(rank, rank))
            assert hvd.synchronize(handle).tolist() == [r for r in range(size) for _ in range(r)]
            assert hvd.broadcast_object({"rank": rank}, size - 1) == {"rank": size - 1}
            hvd.barrier()
        return "done"

    assert ranks.run(body) == ["done"] * size


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients(ranks, overlap):
    def body(rank):
        buckets = GradientBuckets([("w", (5,), "float32"), ("b", (2,), "float16")], op=hvd.Sum, overlap=overlap)
        for step in range(4):
            for index, view in enumerate(buckets.views):
                view[:] = rank + step
                buckets.ready(index)
            assert buckets.finish() == [True, True]
            assert buckets.views[0].tolist() == [sum(r + step for r in range(ranks.size))] * 5
        return "done"

    assert ranks.run(body) == ["done"] * ranks.size


def test_close_ends_a_thread_that_waits_and_what_comes_later():
    engine = Engine(spin_polls=0)
    errors: list[BaseException] = []

    def wait():
        try:
            engine.wait(Handle("never"))
        except ShutDownError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    engine.close()
    thread.join(10)
    wait()
    assert len(errors) == 2
