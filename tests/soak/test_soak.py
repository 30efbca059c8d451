"""The long runs of ``make soak``: 10,000 operations on 4 ranks, and 3,000 re-wraps of one model."""

from __future__ import annotations

import pytest

from tests.launch import SCALE, run_ranks

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
