"""Runs the schedules of N virtual ranks in random order: finds missing fences and wrong orders.

::

    Interleaver(4, seed=7).run(lambda rank: ring_allreduce(group(rank), buffers[rank], kernel))

Whatever MPI may do, it does sooner or later: any rank that can go on may be next; a message's data
is taken from the sender's buffer and put into the receiver's at any moment after both have posted
it; or the sender is told at once that its message has left. In each run some ranks and messages are
up to a thousand times slower than others, so that one is far ahead where nothing holds it back.
What MPI forbids is an error even where it does no harm: memory that takes part in two messages at
once (unless both are sends), and an end without waiting.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from horo_lite.interfaces import Array, Exchange, Native, Recv, Send, Wait
from horo_lite.transport.emulation import (
    DeadlockError,
    MessageMismatchError,
    carry_out_native,
    copy_bytes,
    snapshot,
)
from horo_lite.transport.simulator import Program


class _Half:
    """One side of a message."""

    __slots__ = ("buffer", "complete", "memory", "peer", "rank", "sends")

    def __init__(self, rank: int, buffer: Array, peer: int, sends: bool) -> None:
        self.rank = rank
        self.memory = buffer
        self.buffer = buffer  # or a copy, of a message that has left
        self.peer = peer
        self.sends = sends
        self.complete = False


class Interleaver:
    """N virtual ranks without a clock.

    Args:
        size: how many.
        seed: which order; the same seed gives the same run.
        eager: the share of sends that complete at once.
    """

    def __init__(self, size: int, seed: int, *, eager: float = 0.3) -> None:
        self.size = size
        self._random = random.Random(seed)
        self._eager = eager
        self._pace = [10.0 ** self._random.uniform(0.0, 3.0) for _ in range(size)]

    def run(self, program: Program) -> list[Any]:
        """Run ``program(rank)`` on every rank; returns what they returned.

        Raises:
            DeadlockError: no rank can go on.
            MessageMismatchError: lengths differ, a message was left over or not waited for, or two
                share memory.
        """
        made = [program(rank) for rank in range(self.size)]
        schedules = {rank: schedule for rank, schedule in enumerate(made) if schedule is not None}
        self._channels: dict[tuple[int, int], deque[_Half]] = {}
        self._matched: list[tuple[_Half, _Half]] = []
        self._natives: list[tuple[int, Native]] = []
        self._waits: dict[int, Sequence[_Half]] = {}
        self._open: list[set[_Half]] = [set() for _ in range(self.size)]  # not yet waited for
        results: list[Any] = [None] * self.size
        replies: list[Any] = [None] * self.size
        live = set(schedules)
        while live:
            choice = self._choose(live)
            if not isinstance(choice, int):
                self._deliver(*choice)
                continue
            try:
                instruction = schedules[choice].send(replies[choice])
            except StopIteration as stop:
                results[choice] = stop.value
                live.remove(choice)
                self._check_waited(choice)
            else:
                self._waits[choice] = ()
                replies[choice] = self._carry_out(choice, instruction)
        for queue in self._channels.values():
            for half in queue:
                raise MessageMismatchError(
                    f"rank {half.rank} and rank {half.peer} disagree about a message"
                )
        return results

    def _choose(self, live: set[int]) -> int | tuple[_Half, _Half]:
        """What happens next: a rank goes on, or a matched message arrives."""
        runnable = [rank for rank in sorted(live) if self._can_go_on(rank)]
        choices: list[int | tuple[_Half, _Half]] = [*runnable, *self._matched]
        if not choices:
            waits = "; ".join(
                f"rank {rank} waits for {self._describe(rank)}" for rank in sorted(live)
            )
            raise DeadlockError(f"no rank can go on: {waits}")
        weights = [self._pace[rank] for rank in runnable]
        weights += [self._pace[recv.rank] for _, recv in self._matched]
        return self._random.choices(choices, weights)[0]

    def _check_waited(self, rank: int) -> None:
        for half in self._open[rank]:
            what = "sent to" if half.sends else "asked from"
            raise MessageMismatchError(
                f"rank {rank} ended without waiting for what it {what} rank {half.peer}"
            )

    def _can_go_on(self, rank: int) -> bool:
        return all(half.complete for half in self._waits.get(rank, ()))

    def _describe(self, rank: int) -> str:
        waits = [half for half in self._waits[rank] if not half.complete]
        return " and ".join(
            f"{'taking by' if half.sends else 'a message from'} rank {half.peer}" for half in waits
        )

    def _carry_out(self, rank: int, instruction: Any) -> _Half | None:
        if isinstance(instruction, Send):
            return self._post(_Half(rank, instruction.buffer, instruction.peer, True))
        if isinstance(instruction, Recv):
            return self._post(_Half(rank, instruction.buffer, instruction.peer, False))
        if isinstance(instruction, Wait):
            self._waits[rank] = tuple(instruction.tokens)
            self._open[rank].difference_update(instruction.tokens)
        elif isinstance(instruction, Exchange):
            self._waits[rank] = (
                self._post(_Half(rank, instruction.outgoing, instruction.dst, True)),
                self._post(_Half(rank, instruction.incoming, instruction.src, False)),
            )
            self._open[rank].difference_update(self._waits[rank])
        else:
            entered = _Half(rank, instruction.buffer, rank, False)
            self._waits[rank] = (entered,)
            self._natives.append((rank, instruction))
            if len(self._natives) == self.size:
                carry_out_native(self._natives)
                self._natives = []
                for halves in self._waits.values():
                    for half in halves:
                        half.complete = True
        return None

    def _post(self, half: _Half) -> _Half:
        for other in self._open[half.rank]:
            overlap = np.may_share_memory(half.memory, other.memory)
            if overlap and not (half.sends and other.sends):
                raise MessageMismatchError(
                    f"rank {half.rank} uses memory for a message with rank {half.peer} while one "
                    f"with rank {other.peer} still uses it"
                )
        self._open[half.rank].add(half)
        if half.sends and self._random.random() < self._eager:
            half.buffer = snapshot(half.buffer)
            half.complete = True
        channel = (half.rank, half.peer) if half.sends else (half.peer, half.rank)
        queue = self._channels.setdefault(channel, deque())
        if queue and queue[0].sends is not half.sends:
            other = queue.popleft()
            send, recv = (half, other) if half.sends else (other, half)
            if send.buffer.nbytes != recv.buffer.nbytes:
                raise MessageMismatchError(
                    f"rank {send.rank} sent {send.buffer.nbytes} bytes to rank {recv.rank}, "
                    f"which asked for {recv.buffer.nbytes}"
                )
            self._matched.append((send, recv))
        else:
            queue.append(half)
        return half

    def _deliver(self, send: _Half, recv: _Half) -> None:
        self._matched.remove((send, recv))
        if recv.buffer.nbytes:
            copy_bytes(recv.buffer, send.buffer)
        send.complete = recv.complete = True
