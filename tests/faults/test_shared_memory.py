"""Memory that the ranks of a node share, where it can't be had as usual, and when a rank is killed while it is made."""

from __future__ import annotations

import os
import time

import pytest

from tests.faults.jobs import PREAMBLE, assert_bad_end, assert_good_end, job
from tests.launch import SCALE, wait_until

pytestmark = pytest.mark.openmpi

SHARED = """
import os, signal
from horo_lite.transport.shared import SharedBlock, SharedMemoryError
"""

KILLED = SHARED + """
def killed(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)  # all have made their files by now, and nobody has closed them to others
SharedBlock.attach = killed
"""

UNSEEN = SHARED + """
named, attach = [], SharedBlock.attach.__func__
def unseen(cls, token, *arguments):
    if "/" in token:
        raise SharedMemoryError("no such process here")
    named.append(token)
    return attach(cls, token, *arguments)
SharedBlock.attach = classmethod(unseen)
"""


def names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("horo_lite")}


def test_ranks_killed_while_they_come_to_share_memory_leave_nothing_there():
    before = names()
    done = job("hvd.allreduce(np.ones(3_000_000)); raise SystemError('not killed')", preamble=KILLED + PREAMBLE)
    assert_bad_end(done)
    assert "not killed" not in done.output
    wait_until(lambda: not names() - before, time.monotonic() + SCALE)  # other tests' come and go
    assert not names() - before


def test_ranks_that_cannot_look_into_one_another_share_memory_all_the_same():
    body = """
    for elements in (4, 100_000, 3_000_000):
        for _ in range(3):
            assert (hvd.allreduce(np.full(elements, rank + 1.0), op=hvd.Sum) == 3.0).all()
    print(f"attached {len(named) > 0} by name, left {[name for name in named if os.path.exists('/dev/shm/' + name)]}")
    """
    done = job(body, preamble=UNSEEN + PREAMBLE)
    assert_good_end(done)
    assert done.output.count("attached True by name, left []") == 2
    assert "share no memory" not in done.output
