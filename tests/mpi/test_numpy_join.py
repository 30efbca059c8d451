"""join(): a rank out of data takes part in everything until all have joined."""

from __future__ import annotations

import numpy as np
import pytest

from horo_lite.gradients import GradientBuckets


def rounds(hvd, own, body):
    """``body(step)`` for ``own`` steps, then join(); afterwards everything still works."""
    for step in range(own):
        body(step)
    last = hvd.join()
    assert hvd.allreduce(np.array([1.0]), op=hvd.Sum).tolist() == [hvd.size()]
    assert hvd.broadcast(np.array([hvd.rank()]), hvd.size() - 1).tolist() == [hvd.size() - 1]
    return last


def taking_part(hvd, step, batches):
    """The ranks that still have data in this step."""
    return [rank for rank in range(hvd.size()) if step < batches[rank]]


@pytest.mark.ranks(2)
def test_the_third_batch_is_averaged_with_zero(hvd):
    got = []
    last = rounds(hvd, 3 - hvd.rank(), lambda step: got.append(float(hvd.allreduce(np.array([4.0]))[0])))
    assert got == [4.0, 4.0, 2.0][: 3 - hvd.rank()]
    assert last == 0


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("first", [0, 1])
def test_every_collective_goes_on_without_a_joined_rank(hvd, first):
    """Rank ``first`` joins at once, the others have one step more each, in turn."""
    size, rank = hvd.size(), hvd.rank()
    batches = [(r - first) % size for r in range(size)]

    def body(step):
        there = taking_part(hvd, step, batches)
        n = len(there)
        own = np.full(6, rank + 1.0)
        total = sum(r + 1.0 for r in there)
        assert hvd.allreduce(own, op=hvd.Sum).tolist() == [total] * 6
        assert hvd.allreduce(own).tolist() == pytest.approx([total / size] * 6)
        assert hvd.allreduce(own, op=hvd.Max).tolist() == [max(there) + 1] * 6
        assert hvd.allreduce(own, op=hvd.Min).tolist() == [min(there) + 1] * 6
        assert hvd.allreduce(own, op=hvd.Product).tolist() == [np.prod([r + 1.0 for r in there])] * 6
        assert hvd.allreduce(own.astype(np.int8), op=hvd.Min).tolist() == [min(there) + 1] * 6
        assert hvd.allreduce(np.array([False]), op=hvd.Sum).tolist() == [False]
        assert hvd.allreduce(np.array([True]), op=hvd.Min).tolist() == [True]
        assert hvd.allreduce(np.ones(20_000, np.float16), op=hvd.Sum).tolist() == [n] * 20_000
        assert hvd.allreduce(np.full(30_000, 2.0), name="named").tolist() == pytest.approx([2 * n / size] * 30_000)
        group = hvd.grouped_allreduce([np.ones(2), np.ones((2, 2), np.int32)], op=hvd.Sum, name=f"group.{step}")
        assert [part.sum() for part in group] == [2 * n, 4 * n]
        assert hvd.allgather(np.full((2, 1), rank)).ravel().tolist() == [r for r in there for _ in range(2)]
        assert hvd.allgather(np.array(rank), name="scalar").tolist() == there
        got, received = hvd.alltoall(np.arange(size) + 10 * rank, splits=[1] * size)
        assert got.tolist() == [10 * r + rank for r in there]
        assert received.tolist() == [int(r in there) for r in range(size)]
        counts = [5 // n + (place < 5 % n) for place in range(n)]
        start = sum(counts[: there.index(rank)])
        scattered = hvd.reducescatter(np.arange(5.0), op=hvd.Sum)
        assert scattered.tolist() == [k * float(n) for k in range(start, start + counts[there.index(rank)])]
        assert hvd.broadcast(np.array([rank]), there[-1]).tolist() == [there[-1]]
        assert hvd.broadcast_object({"step": step}, there[0]) == {"step": step}
        assert hvd.allgather_object(rank) == there
        hvd.barrier()

    assert rounds(hvd, batches[rank], body) == (first + size - 1) % size


@pytest.mark.ranks(2, 3)
def test_a_broadcast_from_a_joined_rank_is_an_error_on_the_others(hvd):
    if hvd.rank() != 1:
        with pytest.raises(hvd.DisagreementError, match=r"rank 1 is its root but has called join\(\)"):
            hvd.broadcast(np.ones(2), 1, name="from a joined rank")
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="goes on").tolist() == [hvd.size() - 1]
    assert hvd.join() != 1


@pytest.mark.ranks(2, 3)
def test_a_disagreement_while_one_rank_has_joined(hvd):
    if hvd.rank() != 1:
        if hvd.size() == 3:
            with pytest.raises(hvd.DisagreementError, match="shapes"):
                hvd.allreduce(np.ones(2 + hvd.rank()), name="differs")
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="goes on").tolist() == [hvd.size() - 1]
    hvd.join()


@pytest.mark.ranks(2, 3)
def test_what_was_started_before_joining_is_finished(hvd):
    """Rank 1 does not wait for its operation before it joins; nobody else asks for it."""
    handle = hvd.allreduce_async(np.full(40_000, 3.0), name="left behind", op=hvd.Sum) if hvd.rank() == 1 else None
    hvd.join()
    if handle is not None:
        assert hvd.synchronize(handle).tolist() == [3.0] * 40_000
    hvd.barrier()


def test_join_alone_and_again_and_again(hvd):
    for _ in range(5):
        assert 0 <= hvd.join() < hvd.size()


# --- the planned lane ---------------------------------------------------------------------------------------------

SHAPES = [("a", (3, 4), "float32"), ("b", (40_000,), "float32"), ("c", (), "float64"), ("d", (5,), "bfloat16")]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("op_name", ["Average", "Sum", "Adasum"])
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("batches", [(2, 1, 2, 0), (0, 2, 1, 1)])
def test_gradients_of_a_joined_rank_count_as_zero(hvd, overlap, op_name, batches):
    size, rank = hvd.size(), hvd.rank()
    batches = batches[:size]
    buckets = GradientBuckets(SHAPES, op=getattr(hvd, op_name), bucket_bytes=1000, overlap=overlap)
    for _ in range(2):
        for step in range(batches[rank]):
            there = taking_part(hvd, step, batches)
            for index in range(len(SHAPES)):
                if index == 2 and rank % 2:
                    continue
                buckets.views[index][:] = rank + 1
                buckets.ready(index)
            used = buckets.finish()
            assert used == [True, True, any(r % 2 == 0 for r in there), True]
            total = sum(r + 1 for r in there)
            if op_name != "Adasum":
                wanted = total / (size if op_name == "Average" else 1)
                np.testing.assert_allclose(buckets.views[0], np.full(12, wanted), rtol=1e-6)
                assert buckets.views[3].astype(float).tolist() == pytest.approx([wanted] * 5, rel=1e-2)
            elif len(there) == 1:
                assert buckets.views[1].tolist() == [total] * 40_000
        assert batches[hvd.join()] == max(batches)
    buckets.close()


@pytest.mark.ranks(2, 3)
def test_both_lanes_while_one_rank_has_joined(hvd):
    buckets = GradientBuckets(SHAPES[:2], op=hvd.Sum, bucket_bytes=1000)
    steps = 3 if hvd.rank() == 0 else 1
    for step in range(steps):
        for index in (0, 1):
            buckets.views[index][:] = 1.0
            buckets.ready(index)
        buckets.finish()
        expected = hvd.size() if step == 0 else 1
        assert buckets.views[0].tolist() == [expected] * 12
        assert float(hvd.allreduce(np.array(1.0), op=hvd.Sum, name="loss")) == expected
    assert hvd.join() == 0
