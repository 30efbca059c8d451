"""Tests that go wrong in each way that the runner must survive; collected only by tests/faults/test_runner.py."""

from __future__ import annotations

import os
import signal
import time

import pytest
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.ranks(2)


def test_before():
    assert WORLD.allreduce(1) == 2


def test_hangs_on_rank_1():
    if WORLD.rank == 1:
        time.sleep(600)


def test_after_hang():
    assert WORLD.allreduce(1) == 2


def test_fails_on_rank_1_while_rank_0_waits():
    print("about to fail")
    assert WORLD.rank == 0
    WORLD.barrier()


def test_after_failure():
    assert WORLD.allreduce(1) == 2


def test_kills_rank_1():
    if WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    WORLD.barrier()


def test_after_kill():
    assert WORLD.allreduce(1) == 2


def test_skips():
    pytest.skip("a reason")


def test_skips_on_rank_1():
    if WORLD.rank == 1:
        pytest.skip("only here")


@pytest.mark.parametrize("value", [1, 2])
def test_with_parameter(value, capsys):
    print(value)
    assert capsys.readouterr().out == f"{value}\n"


@pytest.mark.ranks(1, 3)
def test_at_the_end():
    assert WORLD.allreduce(1) in (1, 3)
