"""Operations in any order on different ranks, many at a time, from several threads; handles; messages cut in pieces."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from tests.contracts.compression import Halve
from tests.launch import run_ranks


@pytest.mark.ranks(2, 3, 4)
def test_two_operations_in_opposite_orders(hvd):
    names = ["a", "b"] if hvd.rank() % 2 == 0 else ["b", "a"]
    value = {"a": 1.0, "b": 10.0}
    handles = {name: hvd.allreduce_async(np.array([value[name]]), name=name, op=hvd.Sum) for name in names}
    assert hvd.synchronize(handles["a"]).tolist() == [hvd.size()]
    assert hvd.synchronize(handles["b"]).tolist() == [10.0 * hvd.size()]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("seed", range(3))
def test_all_kinds_in_random_order(hvd, seed):
    """Every rank submits the same operations in an order of its own, and waits in another."""
    size, rank = hvd.size(), hvd.rank()
    root = seed % size
    rows = [(seed + r) % 3 for r in range(size)]
    large = np.arange(30_000, dtype=np.float32)

    def submit(kind, name):
        if kind == "sum":
            return hvd.allreduce_async(np.full(7, rank + 1.0), name=name, op=hvd.Sum)
        if kind == "large":
            return hvd.allreduce_async(large + rank, name=name)
        if kind == "group":
            return hvd.grouped_allreduce_async([np.full(3, rank), np.full((2, 2), 1.0)], name=name, op=hvd.Sum)
        if kind == "gather":
            return hvd.allgather_async(np.full((rows[rank], 2), rank), name=name)
        if kind == "broadcast":
            return hvd.broadcast_async(np.full(5, rank), root, name=name)
        if kind == "alltoall":
            return hvd.alltoall_async(np.arange(size) + 10 * rank, name=name)
        return hvd.reducescatter_async(np.ones((size, 2)), name=name, op=hvd.Sum)

    def check(kind, got):
        if kind == "sum":
            assert got.tolist() == [size * (size + 1) / 2] * 7
        elif kind == "large":
            np.testing.assert_allclose(got, large + (size - 1) / 2)
        elif kind == "group":
            assert got[0].tolist() == [size * (size - 1) // 2] * 3
            assert got[1].tolist() == [[size, size]] * 2
        elif kind == "gather":
            assert got[:, 0].tolist() == np.repeat(np.arange(size), rows).tolist()
        elif kind == "broadcast":
            assert got.tolist() == [root] * 5
        elif kind == "alltoall":
            assert got[0].tolist() == [10 * r + rank for r in range(size)]
            assert got[1] == [1] * size
        else:
            assert got.tolist() == [[size, size]]

    kinds = ["sum", "large", "group", "gather", "broadcast", "alltoall", "reducescatter"]
    jobs = [(kind, f"{kind}.{number}") for kind in kinds for number in range(4)]
    order = random.Random(100 * seed + rank)
    order.shuffle(jobs)
    pending = [(kind, submit(kind, name)) for kind, name in jobs]
    order.shuffle(pending)
    for kind, handle in pending:
        check(kind, hvd.synchronize(handle))


@pytest.mark.ranks(1, 2, 3)
def test_poll_becomes_true_and_synchronize_may_be_called_again(hvd):
    handle = hvd.allreduce_async(np.ones(1000), op=hvd.Sum)
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle)[0] == hvd.size()
    assert hvd.synchronize(handle)[0] == hvd.size()
    assert hvd.poll(handle)


@pytest.mark.ranks(2)
def test_poll_is_false_until_the_other_rank_has_asked(hvd):
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(np.ones(2), name="late")
        assert not hvd.poll(handle)
        hvd.barrier()
        assert hvd.synchronize(handle).tolist() == [1.0, 1.0]
    else:
        hvd.barrier()
        assert hvd.allreduce(np.ones(2), name="late").tolist() == [1.0, 1.0]


@pytest.mark.ranks(1, 2)
@pytest.mark.limit(60)
def test_two_thousand_operations_under_way(hvd):
    for _ in range(2):
        handles = [hvd.allreduce_async(np.array([float(k)]), name=f"many.{k}", op=hvd.Sum) for k in range(2000)]
        got = [float(hvd.synchronize(handle)[0]) for handle in handles]
        assert got == [float(k * hvd.size()) for k in range(2000)]


@pytest.mark.ranks(2, 3)
def test_a_name_is_used_again_at_once(hvd):
    for step in range(200):
        got = hvd.allreduce(np.array([float(step)]), name="again", op=hvd.Sum)
        assert got.tolist() == [float(step * hvd.size())]


@pytest.mark.ranks(2)
def test_a_name_that_waits_for_others_can_not_be_used_twice(hvd):
    for first in (0, 1):
        if hvd.rank() == first:
            handle = hvd.allreduce_async(np.ones(2), name="twice")
            with pytest.raises(ValueError, match="'twice' is already under way"):
                hvd.allreduce_async(np.ones(2), name="twice")
        hvd.barrier()
        if hvd.rank() != first:
            handle = hvd.allreduce_async(np.ones(2), name="twice")
        assert hvd.synchronize(handle).tolist() == [1.0, 1.0]


@pytest.mark.ranks(2, 3)
def test_shapes_that_alternate_under_one_name(hvd):
    for step in range(30):
        elements = (3, 8, 1)[step % 3]
        assert hvd.allreduce(np.ones(elements), name="alternates", op=hvd.Sum).tolist() == [hvd.size()] * elements


@pytest.mark.ranks(2, 3)
def test_more_names_and_row_counts_than_are_remembered(hvd, monkeypatch):
    """What was agreed on is forgotten in the same order everywhere, also with requests under way."""
    from horo_lite.engine import response_cache

    monkeypatch.setattr(response_cache, "_CAPACITY", 8)
    monkeypatch.setattr(response_cache, "_NUMBERED_CAPACITY", 32)
    size, rank = hvd.size(), hvd.rank()
    for _ in range(3):
        handles = [hvd.allreduce_async(np.array([1.0]), name=f"cached.{k}", op=hvd.Sum) for k in range(60)]
        assert {float(hvd.synchronize(handle)[0]) for handle in handles} == {size}
        for k in range(50):
            rows = k if rank == 0 else 1  # the others' own requests never change
            got = hvd.allgather(np.zeros(rows), name="rows")
            assert len(got) == k + size - 1
            if k % 20 == 0:
                assert hvd.allreduce(np.array([2.0]), name="cached.3", op=hvd.Sum).tolist() == [2.0 * size]


@pytest.mark.ranks(1, 2, 3)
def test_several_threads_call_at_once(hvd):
    errors = []

    def work(number):
        try:
            for step in range(25):
                got = hvd.allreduce(np.array([float(number + step)]), name=f"thread.{number}.{step}", op=hvd.Sum)
                assert got.tolist() == [float((number + step) * hvd.size())]
                handle = hvd.allgather_async(np.array([number]), name=f"thread.{number}.{step}.gather")
                assert hvd.synchronize(handle).tolist() == [number] * hvd.size()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.ranks(2)
def test_one_thread_waits_long_while_others_come_and_go(hvd):
    result = []
    waiter = threading.Thread(target=lambda: result.append(hvd.allreduce(np.ones(1), name="long wait", op=hvd.Sum)))
    if hvd.rank() == 0:
        waiter.start()
    for step in range(20):
        assert hvd.allreduce(np.ones(2), name=f"short.{step}", op=hvd.Sum).tolist() == [2.0, 2.0]
    if hvd.rank() == 1:
        waiter.start()
    waiter.join()
    assert result[0].tolist() == [2.0]


CHUNKS = """
import numpy as np
import horo_lite as hvd
hvd.init()
size, rank = hvd.size(), hvd.rank()
got = hvd.allreduce(np.ones(10_007, np.float32), op=hvd.Sum)
assert (got == size).all() and len(got) == 10_007, got
assert hvd.allreduce(np.arange(10_007), op=hvd.Max)[10_006] == 10_006
assert (hvd.allreduce(np.ones(10_007, np.float16), op=hvd.Sum) == size).all()
assert hvd.broadcast_object(b"x" * 50_000 if rank == 1 else None, 1) == b"x" * 50_000
assert hvd.allgather_object({"rank": rank, "bytes": b"y" * 5000})[1] == {"rank": 1, "bytes": b"y" * 5000}
assert (hvd.allgather(np.full(3_001, rank)) == np.repeat(np.arange(size), 3_001)).all()
assert (hvd.broadcast(np.full(5_003, rank), 1) == 1).all()
many = hvd.grouped_allreduce([np.ones(k % 7, np.float32) for k in range(300)], name="n" * 2000, op=hvd.Sum)
assert all((part == size).all() for part in many)
try:
    hvd.allreduce(np.ones((1,) * (rank + 1)), name="differs" * 200)
    raise SystemExit("no error")
except hvd.DisagreementError as error:
    assert "differs" in str(error)
from horo_lite.gradients import GradientBuckets
buckets = GradientBuckets([("w", (5_003,), "float32"), ("b", (7,), "float16")], op=hvd.Sum)
for step in range(3):
    for index, view in enumerate(buckets.views):
        view[:] = rank + 1
        buckets.ready(index)
    assert buckets.finish() == [True, True]
    assert (buckets.views[0] == size * (size + 1) / 2).all()
print("done", rank)
"""


@pytest.mark.ranks(1)
@pytest.mark.limit(60)
@pytest.mark.parametrize("shared", ["0", "1"])
def test_messages_of_at_most_a_thousand_elements(hvd, shared):
    env = {"HORO_LITE_CHUNK_ELEMENTS": "1000", "HORO_LITE_SHARED_MEMORY": shared, "HORO_LITE_TEST_FOLDER": ""}
    done = run_ranks(CHUNKS, ranks=3, limit_s=50, env=env)
    assert done.returncode == 0, done.output
    assert done.output.count("done") == 3


@pytest.mark.ranks(1, 2, 3)
def test_a_compressor_class_defined_in_a_function(hvd):
    class Halved(Halve):
        pass

    for _ in range(3):
        got = hvd.allreduce(np.full(4, 40_000, np.float32), compression=Halved, name="halved")
        assert got.tolist() == [40_000] * 4
