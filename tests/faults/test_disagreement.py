"""Ranks that ask for different things: every rank raises with both values. Uncaught, the job ends."""

from __future__ import annotations

import pytest

from tests.faults.jobs import assert_bad_end, assert_good_end, job

CALLS = {
    "shapes": ("hvd.allreduce(np.ones(4 if rank else 8), name='x')", r"shapes: rank 0: \(8,\); rank 1: \(4,\)"),
    "types": ("hvd.allreduce(np.ones(4, 'float32' if rank else 'float64'), name='x')", "float64; rank 1: float32"),
    "operations": ("(hvd.allreduce if rank else hvd.allgather)(np.ones(4), name='x')", "allgather; rank 1: allreduce"),
    "reduce operations": ("hvd.allreduce(np.ones(4), op=hvd.Sum if rank else hvd.Max, name='x')", "Max; rank 1: Sum"),
    "roots": ("hvd.broadcast(np.ones(4), root_rank=rank, name='x')", "root ranks: rank 0: 0; rank 1: 1"),
    "scales": ("hvd.allreduce(np.ones(4), prescale_factor=1 + rank, name='x')", "prescale factors: rank 0: 1.0"),
    "numbers of tensors": ("hvd.grouped_allreduce([np.ones(4)] * (1 + rank), name='x')", "numbers of tensors"),
    "compressors": (
        "from horo_lite.compression import Compression\n"
        "hvd.allreduce(np.ones(4, 'f4'), name='x', compression=Compression.fp16 if rank else None)", "compressors",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_uncaught_it_ends_the_job(name):
    call, text = CALLS[name]
    assert_bad_end(job(f"{call}\ntime.sleep(60)"), f"DisagreementError: tensor 'x': mismatched .*{text}")


def test_caught_on_every_rank_the_job_goes_on():
    calls = [call for call, _ in CALLS.values() if "\n" not in call]
    body = "".join(
        f"try:\n    {call}\nexcept hvd.DisagreementError as error:\n    seen.append(str(error))\n" for call in calls
    )
    done = job(f"seen = []\n{body}assert len(set(seen)) == {len(calls)}, seen\nassert reduce('y')[0] == size")
    assert_good_end(done)


def test_bucket_plans_that_differ_name_the_parameter():
    done = job("""
        from horo_lite.gradients import GradientBuckets
        GradientBuckets([("weight", (3,), "float32"), ("bias", (1 + rank,), "float32")])
    """)
    assert_bad_end(done, "DisagreementError", "bias")


def test_a_step_that_one_rank_skips_is_found_out():
    done = job("""
        from horo_lite.gradients import GradientBuckets
        first, second = (GradientBuckets([("w", (3,), "float32")], label=label) for label in ("first", "second"))
        for buckets in (first, second) if rank else (second, first):
            buckets.ready(0)
            buckets.finish()
    """)
    assert_bad_end(done, "out of step")


def test_process_sets_that_differ():
    preamble = "import os, numpy as np, horo_lite as hvd\nhvd.init(process_sets='dynamic')\nrank = hvd.rank()\n"
    done = job("hvd.add_process_set([0] if rank else [0, 1])", preamble=preamble)
    assert_bad_end(done, "every rank must register the same process set")
