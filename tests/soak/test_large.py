"""One array of more elements than 32 bits count. Takes about 10 GiB of memory."""

from __future__ import annotations

import pytest

from tests.launch import SCALE, run_ranks

LARGE = """
import numpy as np
import horo_lite as hvd
hvd.init()
elements = 2**31 + 8
array = np.ones(elements, np.int8)
array[-1] = 5 + hvd.rank()
hvd.allreduce_(array, op=hvd.Sum, name="large")
assert array[0] == array[2**31 - 1] == array[2**31] == array[-2] == 2, array[[0, 2**31 - 1, 2**31, -2]]
assert array[-1] == 11
for start in range(0, elements - 1, 2**26):
    part = array[start : min(start + 2**26, elements - 1)]
    assert part.min() == part.max() == 2, start
array[-3:] = hvd.rank() + 3
hvd.broadcast_(array, 1)
assert array[-1] == array[-3] == 4 and array[-4] == 2
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["1", "0"])
def test_more_elements_than_32_bits_count(shared):
    done = run_ranks(LARGE, ranks=2, limit_s=180 * SCALE, env={"HORO_LITE_SHARED_MEMORY": shared})
    assert done.returncode == 0, done.output
    assert done.output.count("done") == 2
