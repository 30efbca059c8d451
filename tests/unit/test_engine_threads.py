"""The engine with its communication thread: the whole framework-free API on several ranks, a thread each."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from horo_lite import functions as hvd
from horo_lite.config import Config
from horo_lite.engine import Engine, Handle
from horo_lite.engine.operations import AllReduce
from horo_lite.errors import HorovodInternalError, ShutDownError
from horo_lite.gradients import GradientBuckets
from horo_lite.interfaces import Reduction
from tests.unit.worlds import Lanes, Threads


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


@pytest.mark.parametrize("held_by", ["a call's short way", "poll", "wait"])
def test_a_call_on_top_of_one_that_polls_in_the_same_thread_is_refused(held_by):
    """As from a signal handler: what it waits for can't get on before it returns."""
    engine = Engine(threaded=False)
    lane = Lanes(1).named[0]
    operation = AllReduce([np.ones(1)], "x", Reduction.SUM)
    engine.add(lane)
    errors: list[BaseException] = []

    def interrupted(*_):
        try:
            engine.wait(Handle("saving"))
        except HorovodInternalError as error:
            errors.append(error)

    operation.values = operation.result = interrupted

    def main():
        if held_by == "a call's short way":
            engine.call(lane, AllReduce([np.ones(1)], "x", Reduction.SUM))  # from now on it is agreed on
            engine.call(lane, operation)
        else:
            lane.submit(operation)
            (engine.poll if held_by == "poll" else engine.wait)(operation.handle)

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    thread.join(10)
    assert errors and "a signal handler or a finalizer called a collective" in str(errors[0])
    engine.close()
