"""The random interleaver finds what goes wrong only in some orders."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from horo_lite.interfaces import Exchange, Recv, Schedule, Send, Wait
from horo_lite.transport.emulation import DeadlockError, MessageMismatchError
from horo_lite.transport.interleaver import Interleaver

SEEDS = range(50)


def results(size: int, program: Callable[[int], Schedule]) -> list[list]:
    return [Interleaver(size, seed).run(program) for seed in SEEDS]


def test_a_send_buffer_that_changes_too_early_is_seen() -> None:
    def program(rank: int, waits: bool) -> Schedule:
        buffer = np.array([7])
        if rank == 0:
            token = yield Send(buffer, 1)
            if waits:
                yield Wait((token,))
            buffer[0] = 8
            yield Wait((token,))
            return 7
        yield Wait(((yield Recv(buffer, 0)),))
        return int(buffer[0])

    assert all(result == [7, 7] for result in results(2, lambda rank: program(rank, True)))
    assert {result[1] for result in results(2, lambda rank: program(rank, False))} == {7, 8}


def test_a_receive_buffer_that_is_read_too_early_is_seen() -> None:
    def program(rank: int) -> Schedule:
        buffer = np.array([rank])
        token = yield Send(buffer, 1) if rank == 0 else Recv(buffer, 0)
        early = int(buffer[0])
        yield Wait((token,))
        return early

    assert {result[1] for result in results(2, program)} == {0, 1}


def test_sends_that_rely_on_being_eager_deadlock_in_some_run() -> None:
    def program(rank: int) -> Schedule:
        buffer = np.array([rank])
        yield Wait(((yield Send(buffer, 1 - rank)),))
        yield Wait(((yield Recv(buffer, 1 - rank)),))

    deadlocks = 0
    for seed in SEEDS:
        try:
            Interleaver(2, seed).run(program)
        except DeadlockError as error:
            assert "rank 0 waits for" in str(error)
            deadlocks += 1
    assert 0 < deadlocks < len(SEEDS)


def test_ranks_get_far_ahead_of_one_another() -> None:
    def program(rank: int) -> Schedule:
        for _ in range(20):
            progress[rank] += 1
            ahead.append(abs(progress[0] - progress[1]))
            yield Wait(())

    ahead: list[int] = []
    for seed in SEEDS:
        progress = [0, 0]
        Interleaver(2, seed).run(program)
    assert max(ahead) == 20


def test_an_end_without_waiting_is_an_error() -> None:
    def program(rank: int) -> Schedule:
        buffer = np.array([rank])
        if rank == 0:
            yield Send(buffer, 1)
        else:
            yield Wait(((yield Recv(buffer, 0)),))

    with pytest.raises(MessageMismatchError, match="rank 0 ended without waiting"):
        Interleaver(2, 1).run(program)


def test_memory_in_two_messages_at_once_is_an_error_though_it_does_no_harm() -> None:
    def program(rank: int) -> Schedule:
        buffer = np.arange(3)
        if rank == 0:
            tokens = [(yield Send(buffer[:2], 1)), (yield Recv(buffer[1:], 1))]
        else:
            tokens = [(yield Recv(buffer[:2], 0))]
            yield Wait(tokens)
            tokens = [(yield Send(buffer[:2], 0))]
        yield Wait(tokens)

    with pytest.raises(MessageMismatchError, match=r"rank 0 uses memory .* still uses it"):
        Interleaver(2, 1).run(program)


def test_lengths_that_differ_and_messages_left_over_are_errors() -> None:
    def unequal(rank: int) -> Schedule:
        yield Exchange(np.zeros(3 + rank), 1 - rank, np.zeros(3 + rank), 1 - rank)

    def left_over(rank: int) -> Schedule:
        if rank == 0:
            yield Wait(((yield Send(np.zeros(1), 1)),))

    with pytest.raises(MessageMismatchError, match="bytes"):
        Interleaver(2, 1).run(unequal)
    with pytest.raises(MessageMismatchError, match="rank 0 and rank 1 disagree"):
        Interleaver(2, 1, eager=1.0).run(left_over)
