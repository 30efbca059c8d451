"""Gradient buckets on both sides of the wire: values, used flags, disagreements, re-wraps, ranks out of step."""

from __future__ import annotations

import gc
import platform
import resource

import numpy as np
import pytest

from horo_lite.gradients import GradientBuckets
from tests.soak import mixed

SHAPES = [("w", (4, 5), "float32"), ("b", (7,), "float32"), ("h", (9,), "bfloat16"), ("s", (), "float64")]


def fill(buckets, value, skip=()):
    for index, view in enumerate(buckets.views):
        if index not in skip:
            view[:] = value
            buckets.ready(index)


@pytest.mark.parametrize("overlap", [True, False, "auto"])
@pytest.mark.parametrize("bucket_bytes", [0, 100, 1 << 20])
def test_mean_sum_and_factors(hvd, overlap, bucket_bytes):
    size, rank = hvd.size(), hvd.rank()
    total = size * (size + 1) / 2
    for op, factor in ((hvd.Average, 1 / size), (hvd.Sum, 1.0)):
        buckets = GradientBuckets(
            SHAPES, op=op, prescale_factor=0.5, postscale_factor=4.0, bucket_bytes=bucket_bytes, overlap=overlap
        )
        for step in range(3):
            assert not buckets.pending
            fill(buckets, (rank + 1) * (step + 1))
            assert buckets.pending
            assert buckets.finish() == [True] * 4
            for view in buckets.views:
                np.testing.assert_allclose(view.astype(float), 2 * total * (step + 1) * factor, rtol=1e-2)
        buckets.close()


def test_gradients_that_only_some_ranks_have(hvd):
    size, rank = hvd.size(), hvd.rank()
    buckets = GradientBuckets(SHAPES, op=hvd.Sum, bucket_bytes=64)
    for _ in range(3):
        fill(buckets, 6.0, skip={0, 1} if rank == size - 1 and size > 1 else {1})
        assert buckets.finish() == [True, False, True, True]
        assert buckets.views[0].tolist() == [6.0 * max(1, size - 1)] * 20
        assert buckets.views[1].tolist() == [0.0] * 7
    assert buckets.finish() == [False] * 4, "a step in which nobody has anything"


def test_views_outlive_close_and_the_buckets(hvd):
    buckets = GradientBuckets(SHAPES[:2], op=hvd.Sum)
    fill(buckets, 1.0)
    buckets.finish()
    views = buckets.views
    buckets.close()
    buckets.close()
    del buckets
    gc.collect()
    assert views[0].tolist() == [hvd.size()] * 20
    views[0][:] = 3.0
    hvd.barrier()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_are_dropped_while_a_bucket_is_under_way(hvd, overlap):
    for _ in range(5):
        buckets = GradientBuckets([("w", (30_000,), "float32")], op=hvd.Sum, overlap=overlap)
        fill(buckets, 1.0)
        buckets.finish()
        fill(buckets, 2.0)
        del buckets
        gc.collect()
        if not overlap:
            continue
        again = GradientBuckets([("w", (30_000,), "float32")], op=hvd.Sum)
        fill(again, 3.0)
        again.finish()
        assert again.views[0][-1] == 3.0 * hvd.size()


@pytest.mark.ranks(2, 3)
def test_buckets_that_all_ranks_have_dropped_are_let_go_with_the_next_plan(hvd):
    """Until then a rank that joins takes part in them, where others go on."""
    def dropped(count):
        for _ in range(count):
            fill(GradientBuckets(SHAPES, op=hvd.Sum), 1.0)

    gc.collect()
    dropped(2)
    before = mixed.left_behind()
    dropped(5)
    assert mixed.left_behind() == before
    kept = GradientBuckets(SHAPES, op=hvd.Sum)
    if hvd.rank() == 0:
        fill(kept, 3.0)
        kept.finish()
        assert kept.views[1].tolist() == [3.0] * 7
    else:
        del kept
        gc.collect()
    assert hvd.join() == 0


@pytest.mark.ranks(1)
def test_memory_that_a_step_frees_is_there_for_the_next(hvd):
    """By default malloc gives 64 MiB back to the system, and the next 64 MiB are 16,384 pages to be cleared."""
    if not platform.libc_ver()[0]:
        pytest.skip("malloc is not glibc's")
    GradientBuckets(SHAPES).close()
    faults = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        bytes([1]) * (64 << 20)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert max(faults[1:]) < 1000, faults


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("failing", ["one", "all"])
@pytest.mark.parametrize("op_name", ["Sum", "Adasum"])
def test_a_step_that_fails(hvd, failing, op_name):
    last = hvd.rank() == hvd.size() - 1
    buckets = GradientBuckets(SHAPES, op=getattr(hvd, op_name), bucket_bytes=64, overlap=True)
    for _ in range(3):
        fill(buckets, 2.0, skip={2, 3} if last or failing == "all" else ())
        if failing == "all":
            buckets.finish(failed=True)
        else:
            with pytest.raises(hvd.HorovodInternalError, match=r"failed midway on (another|this) rank"):
                buckets.finish(failed=last)
        fill(buckets, 2.0)
        assert buckets.finish() == [True] * 4
        assert buckets.views[1].tolist() == [2.0 if op_name == "Adasum" else 2.0 * hvd.size()] * 7
    buckets.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("other", "texts"),
    [
        ([*SHAPES, ("extra", (2,), "float32")], ["rank 0: 4", "extra", "absent", "float32 (2,)"]),
        ([SHAPES[0], ("b", (8,), "float32"), *SHAPES[2:]], ["b", "(7,)", "(8,)"]),
        ([SHAPES[0], ("b", (7,), "float64"), *SHAPES[2:]], ["b", "float32", "float64"]),
        ([SHAPES[1], SHAPES[0], *SHAPES[2:]], ["registered as number 0"]),
    ],
    ids=["number", "shape", "type", "order"],
)
def test_plans_that_differ(hvd, other, texts):
    for _ in range(2):
        with pytest.raises(hvd.DisagreementError) as caught:
            GradientBuckets(other if hvd.rank() == hvd.size() - 1 else SHAPES, label="my model")
        for text in ("my model", *texts):
            assert text in str(caught.value)
    buckets = GradientBuckets(SHAPES, op=hvd.Sum)
    fill(buckets, 1.0)
    assert buckets.finish() == [True] * 4
    assert float(buckets.views[3][0]) == hvd.size()


@pytest.mark.ranks(2)
def test_settings_that_differ(hvd):
    last = hvd.rank() == 1
    for arguments in (
        {"op": hvd.Sum if last else hvd.Average}, {"prescale_factor": 2.0 if last else 1.0},
        {"bucket_bytes": 100 if last else 200}, {"groups": 2 if last else None},
    ):  # fmt: skip
        with pytest.raises(hvd.DisagreementError, match="rank 1"):
            GradientBuckets(SHAPES, **arguments)


@pytest.mark.ranks(1, 2)
def test_wrong_arguments(hvd):
    for parameters in ([("w", (2,), "float32")] * 2, [("w", (2,), "int32")], [("w", (2,), "text")]):
        with pytest.raises((ValueError, TypeError)):
            GradientBuckets(parameters)
    with pytest.raises(ValueError):
        GradientBuckets(SHAPES, groups=[[0], [0, 1]])
    assert GradientBuckets([]).finish() == []


@pytest.mark.ranks(2)
def test_wrong_arguments_on_one_rank_only(hvd):
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="unique"):
            GradientBuckets([("w", (2,), "float32")] * 2)
    else:
        with pytest.raises(hvd.DisagreementError, match=r"rank 0 could not take part.*unique"):
            GradientBuckets(SHAPES)
    buckets = GradientBuckets(SHAPES, op=hvd.Sum)
    fill(buckets, 1.0)
    buckets.finish()
    assert buckets.views[0][0] == 2


@pytest.mark.ranks(2, 3)
def test_two_optimizers_stepped_in_another_order_are_found_out(hvd):
    hvd.shutdown()
    hvd.init()
    first, second = GradientBuckets(SHAPES[:1], label="generator"), GradientBuckets(SHAPES[:1], label="critic")
    order = [first, second] if hvd.rank() == 0 else [second, first]
    with pytest.raises(hvd.DisagreementError, match=r"out of step.*(generator|critic)"):
        for buckets in order:
            fill(buckets, 1.0)
            buckets.finish()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [hvd.size()], "the named lane goes on"
    hvd.shutdown()
    hvd.init()
    buckets = GradientBuckets(SHAPES[:1], op=hvd.Sum)
    fill(buckets, 1.0)
    buckets.finish()
    assert buckets.views[0][0] == hvd.size()


@pytest.mark.ranks(3)
@pytest.mark.limit(60)
def test_a_short_soak_leaves_nothing_behind(hvd):
    gc.collect()  # buckets that earlier tests have left in cycles
    mixed.mixed_operations(hvd, 100)
    mixed.rewraps(hvd, 5)
    before = mixed.left_behind()
    mixed.mixed_operations(hvd, 240, seed=1)
    mixed.rewraps(hvd, 10)
    hvd.barrier()
    assert mixed.left_behind() == before


@pytest.mark.ranks(2, 3)
def test_messages_that_nobody_received_do_not_reach_the_next_world(hvd):
    for _ in range(4):  # a freed communicator's number is given to one of the next
        for lane in hvd.global_process_set.member().lanes:
            for length in (0, 7, 100_000):
                lane.transport.send(np.zeros(length, np.uint8), (hvd.rank() + 1) % hvd.size(), 12_345)
        hvd.shutdown()
        hvd.init()
        hvd.barrier()
        assert [lane.transport.probe() for lane in hvd.global_process_set.member().lanes] == [None, None]
        assert hvd.allreduce(np.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3


@pytest.mark.openmpi
@pytest.mark.ranks(2, 3)
def test_a_receive_that_nobody_waits_for_takes_nothing_from_the_next_world(hvd):
    """MPI may give the next world the number of this one, and with it what was posted here."""
    buffer, tokens = np.zeros(5, np.uint8), []
    for lane in hvd.global_process_set.member().lanes:
        token = lane.transport.recv(buffer, (hvd.rank() + 1) % hvd.size(), 12_345)
        lane.transport.abandon([token], ())
        tokens.append(token)
    hvd.shutdown()
    assert not any(tokens), "a request that is over is the null request, which is false"
    hvd.init()
    for lane in hvd.global_process_set.member().lanes:
        sent = lane.transport.send(np.ones(5, np.uint8), (hvd.rank() - 1) % hvd.size(), 12_345)
        received = np.zeros(5, np.uint8)
        token = lane.transport.recv(received, (hvd.rank() + 1) % hvd.size(), 12_345)
        while not lane.transport.done([sent, token]):
            pass
        assert received.tolist() == [1] * 5
    assert hvd.allreduce(np.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
    assert not buffer.any()
