"""The long runs of ``make soak``: many operations, re-wraps and starts in one job, many jobs in a row, and half an hour
of everything with pauses. Each prints what it has counted.
"""

from __future__ import annotations

import os
import time

import pytest

from tests.launch import SCALE, run_ranks

JOBS, MINUTES = (200, 30) if os.environ.get("HORO_LITE_TEST_SOAK") == "1" else (20, 1)
"""In `make soak`, and in `make test-all`."""

OPERATIONS = """
import horo_lite as hvd
from tests.soak.mixed import left_behind, mixed_operations, resident_bytes
hvd.init()
mixed_operations(hvd, 2_000)
before, memory = left_behind(), resident_bytes()
for seed in range(1, 5):
    mixed_operations(hvd, 2_000, seed)
after, grown = left_behind(), resident_bytes() - memory
assert after == before, (before, after)
assert grown < 16 << 20, grown
hvd.shutdown()
print("done", after, grown >> 10, "KiB")
"""

REWRAPS = """
import horo_lite as hvd
from tests.soak.mixed import left_behind, resident_bytes, rewraps
hvd.init()
rewraps(hvd, 200)
before, memory = left_behind(), resident_bytes()
rewraps(hvd, 2_800)
after, grown = left_behind(), resident_bytes() - memory
assert after == before, (before, after)
assert grown < 16 << 20, grown
print("done", after, grown >> 10, "KiB")
"""

REINIT = """
import horo_lite as hvd
import numpy as np
from tests.soak.mixed import left_behind, rewraps
hvd.init()
before = left_behind()
for _ in range(700):  # three communicators each: MPICH has 2,046
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [hvd.size()]
rewraps(hvd, 1)
after = left_behind()
assert after == before, (before, after)
print("done", after)
"""

ENDURANCE = """
import sys, time
import numpy as np
import horo_lite as hvd
from tests.soak.mixed import left_behind, mixed_operations, resident_bytes, rewraps
hvd.init()
begin, before, last_s, operations = time.monotonic(), None, float(sys.argv[1]), 0
while (elapsed_s := hvd.broadcast(np.array(time.monotonic() - begin), 0, name="time")) < last_s:
    for _ in range(5):
        mixed_operations(hvd, 400, operations, longest_pause_s=5.0)
        rewraps(hvd, 10)
        operations += 400
    hvd.shutdown()
    hvd.init()
    if before is None and elapsed_s > last_s / 6:
        before, memory = left_behind(), resident_bytes()
    if hvd.rank() == 0:
        print(f"{elapsed_s:.0f} s, {operations} operations, {resident_bytes() >> 10} KiB", flush=True)
after, grown = left_behind(), resident_bytes() - memory
assert after == before, (before, after)
assert grown < 16 << 20, grown
print("done", operations, after, grown >> 10, "KiB")
"""

SHORT_JOB = """
import sys
import numpy as np
import horo_lite as hvd
hvd.init()
rank, size = hvd.rank(), hvd.size()
assert (hvd.allreduce(np.ones(100_000, np.float32), op=hvd.Sum, name="x") == size).all()
end = sys.argv[1]
if end == "raises" and rank == 1:
    raise ValueError("on purpose")
if end == "exits" and rank == 1:
    sys.exit(7)
if end in ("raises", "exits"):
    hvd.allreduce(np.ones(1), name="never")
if end == "shuts down":
    hvd.shutdown()
print("done")
"""
EXPECTED = {"returns": 0, "shuts down": 0, "raises": 1, "exits": 7}


@pytest.mark.slow
def test_jobs_in_a_row_end_as_they_should():
    ways = list(EXPECTED)
    shared = set(os.listdir("/dev/shm"))
    begin, longest_s = time.monotonic(), 0.0
    for number in range(JOBS):
        way, ranks = ways[number % len(ways)], 2 + number % 3
        done = run_ranks(SHORT_JOB, ranks, way, limit_s=60)
        assert done.returncode == EXPECTED[way], (number, way, done.output)
        assert done.output.count("done") == (0 if EXPECTED[way] else ranks), (number, way, done.output)
        assert not done.survivors, (number, way)
        longest_s = max(longest_s, done.seconds)
        print(f"{number + 1} jobs in {time.monotonic() - begin:.0f} s, the longest {longest_s:.1f} s", flush=True)
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if name.startswith("horo_lite")]


@pytest.mark.slow
def test_everything_with_pauses():
    done = run_ranks(ENDURANCE, 3, str(60 * MINUTES), limit_s=60 * MINUTES + 300)
    print(done.output)
    assert done.returncode == 0, done.output
    assert done.output.count("done") == 3
    assert "has waited" not in done.output, "a false stall"
    assert not done.survivors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "ranks", "limit_s"), [(OPERATIONS, 4, 600), (REWRAPS, 2, 300), (REINIT, 2, 300)],
    ids=["operations", "rewraps", "reinit"],
)  # fmt: skip
def test_nothing_goes_wrong_and_nothing_is_left_behind(script, ranks, limit_s):
    done = run_ranks(script, ranks=ranks, limit_s=limit_s * SCALE)
    assert done.returncode == 0, done.output
    assert done.output.count("done") == ranks
    assert not done.survivors
