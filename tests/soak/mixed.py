"""Many operations of all kinds in random order, joins in between, gradient buckets made and dropped; nothing may be
left behind. Run by the short test under tests/mpi and by the long one here."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from horo_lite.gradients import GradientBuckets

PARAMETERS = [
    ("w", (50, 20), "float32"), ("b", (), "float32"), ("h", (33,), "float16"), ("large", (30_000,), "float64"),
]

_PAUSES = 0.002  # of all submissions


def mixed_operations(hvd: Any, operations: int, seed: int = 0, longest_pause_s: float = 0.0) -> None:
    """``operations`` on both lanes, in batches that each rank submits in an order of its own; every result checked.

    Args:
        longest_pause_s: each rank pauses now and then, for a random time up to this one.
    """
    shared, own = random.Random(seed), random.Random(1000 * seed + hvd.rank())
    buckets = GradientBuckets(PARAMETERS, op=hvd.Sum, bucket_bytes=20_000, label="soak")
    done = batch = 0
    while done < operations:
        jobs = [(shared.choice(list(_KINDS)), shared.randrange(1 << 20), f"{batch}.{k}") for k in range(20)]
        own.shuffle(jobs)
        step = own.randrange(len(jobs))  # where this rank takes its optimizer step
        pending = []
        for place, (kind, number, name) in enumerate(jobs):
            if place == step:
                optimizer_step(hvd, buckets, batch)
            pending.append(_KINDS[kind](hvd, number, name if number % 3 else f"again.{kind}.{name[-2:]}"))
            if own.random() < _PAUSES:
                time.sleep(own.uniform(0, longest_pause_s))
        own.shuffle(pending)
        for handle, check in pending:
            check(hvd.synchronize(handle))
        done += len(jobs) + len(buckets.views)
        batch += 1
        if batch % 10 == 0:
            joined_round(hvd, buckets, batch)
    buckets.close()


def optimizer_step(hvd: Any, buckets: GradientBuckets, step: int) -> None:
    """Rank r has 1 + r + step % 7 in every gradient; parameter 1 is unused on odd ranks, on all in every third step."""
    value = 1 + hvd.rank() + step % 7
    for index, view in enumerate(buckets.views):
        if index == 1 and (step % 3 == 0 or hvd.rank() % 2):
            continue
        view[:] = value
        buckets.ready(index)
    assert buckets.finish() == [True, step % 3 != 0, True, True]
    total = sum(1 + rank + step % 7 for rank in range(hvd.size()))
    for index in (0, 2, 3):
        assert buckets.views[index][0] == buckets.views[index][-1] == total
    even = sum(1 + rank + step % 7 for rank in range(0, hvd.size(), 2))
    assert buckets.views[1][0] == (0 if step % 3 == 0 else even)


def joined_round(hvd: Any, buckets: GradientBuckets, step: int) -> None:
    """One rank has two batches more than the others."""
    longest = step // 10 % hvd.size()
    if hvd.rank() == longest:
        for _ in range(2):
            buckets.views[0][:] = 5
            buckets.ready(0)
            assert buckets.finish() == [True, False, False, False]
            assert buckets.views[0][-1] == 5
            assert hvd.allreduce(np.array([3.0]), op=hvd.Sum).tolist() == [3.0]
            assert hvd.allgather(np.array([7])).tolist() == [7]
    assert hvd.join() == longest


def rewraps(hvd: Any, times: int) -> None:
    """What wrapping the same model again in every epoch does, one step each."""
    for step in range(times):
        buckets = GradientBuckets(PARAMETERS[:3], op=hvd.Sum, label=f"epoch {step}")
        for index, view in enumerate(buckets.views):
            view[:] = step % 5
            buckets.ready(index)
        assert buckets.finish() == [True] * 3
        assert buckets.views[0][3] == step % 5 * hvd.size()
        buckets.close()


def left_behind() -> dict[str, int]:
    """What of this process must not grow: threads, descriptors, mappings of shared memory, those that have a name."""
    gc.collect()
    shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/#" in line]
    return {
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": len(shared),
        "named mappings": sum(not line.endswith("(deleted)") for line in shared),
    }


def resident_bytes() -> int:
    """This process's memory that is in use and not shared."""
    with open("/proc/self/statm") as file:
        fields = file.read().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def _sum(hvd: Any, number: int, name: str) -> Any:
    elements = number % 300
    handle = hvd.allreduce_async(np.full(elements, float(hvd.rank() + number % 10)), name=name, op=hvd.Sum)
    total = float(sum(rank + number % 10 for rank in range(hvd.size())))
    return handle, lambda got: _equal(got, [total] * elements)


def _large(hvd: Any, number: int, name: str) -> Any:
    elements = 10_000 + number % 20_000
    handle = hvd.allreduce_async(np.full(elements, hvd.rank() + 1, np.float32), name=name, op=hvd.Max)
    return handle, lambda got: _equal(got[[0, -1]], [hvd.size()] * 2)


def _half(hvd: Any, number: int, name: str) -> Any:
    handle = hvd.allreduce_async(np.full(number % 50 + 1, number % 7, np.float16), name=name)
    return handle, lambda got: _equal(got, [number % 7] * (number % 50 + 1))


def _group(hvd: Any, number: int, name: str) -> Any:
    tensors = [np.full(k, hvd.rank()) for k in range(number % 5 + 1)]
    handle = hvd.grouped_allreduce_async(tensors, name=name, op=hvd.Sum)
    total = sum(range(hvd.size()))
    return handle, lambda got: [_equal(part, [total] * k) for k, part in enumerate(got)]


def _gather(hvd: Any, number: int, name: str) -> Any:
    rows = [(number + rank) % 4 for rank in range(hvd.size())]
    handle = hvd.allgather_async(np.full(rows[hvd.rank()], hvd.rank()), name=name)
    return handle, lambda got: _equal(got, np.repeat(np.arange(hvd.size()), rows))


def _broadcast(hvd: Any, number: int, name: str) -> Any:
    root = number % hvd.size()
    handle = hvd.broadcast_async(np.full(number % 1000, hvd.rank()), root, name=name)
    return handle, lambda got: _equal(got, [root] * (number % 1000))


def _scatter(hvd: Any, number: int, name: str) -> Any:
    handle = hvd.reducescatter_async(np.full(hvd.size() * 2, 1.0 * number), name=name)
    return handle, lambda got: _equal(got, [number] * 2)


def _alltoall(hvd: Any, number: int, name: str) -> Any:
    handle = hvd.alltoall_async(np.full(hvd.size(), hvd.rank() + number), name=name)
    return handle, lambda got: _equal(got[0], np.arange(hvd.size()) + number)


def _equal(got: np.ndarray, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-6)


_KINDS = {
    "sum": _sum, "large": _large, "half": _half, "group": _group, "gather": _gather, "broadcast": _broadcast,
    "scatter": _scatter, "alltoall": _alltoall,
}
