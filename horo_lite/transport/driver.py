"""Carries out a schedule on a transport: the loop that every real message passes through.

The same driver serves MPI, the in-process network of the unit tests and a world of one; the simulator with virtual
time has a driver of its own. Nothing here blocks, so any number of schedules can be under way at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horo_lite.interfaces import Exchange, Native, Recv, Schedule, Send, Token, Transport, Wait
from horo_lite.transport.waiting import Backoff


class Running:
    """A schedule under way on one transport, its messages marked with one tag.

    Attributes:
        finished: the schedule has returned.
        result: what it returned.
    """

    __slots__ = ("_pending", "_receives", "_reply", "_schedule", "_tag", "_transport", "finished", "result")

    def __init__(self, schedule: Schedule, transport: Transport, tag: int) -> None:
        self._schedule = schedule
        self._transport = transport
        self._tag = tag
        self._pending: Sequence[Token] = ()
        self._reply: Any = None
        self._receives: list[tuple[int, Token]] = []
        self.finished = False
        self.result: Any = None

    def advance(self) -> bool:
        """Go on until the schedule waits for a message or ends.

        Returns:
            True when at least one instruction was completed.
        """
        transport, tag = self._transport, self._tag
        if self._pending and not transport.done(self._pending):
            return False
        while True:
            try:
                instruction = self._schedule.send(self._reply)
            except StopIteration as stop:
                self.finished, self.result, self._pending = True, stop.value, ()
                self._receives.clear()
                return True
            self._reply = None
            if isinstance(instruction, Exchange):
                outgoing, dst, incoming, src = instruction
                received = transport.recv(incoming, src, tag)
                self._receives.append((src, received))
                self._pending = (received, transport.send(outgoing, dst, tag))
            elif isinstance(instruction, Recv):
                self._reply = transport.recv(instruction.buffer, instruction.peer, tag)
                self._receives.append((instruction.peer, self._reply))
                continue
            elif isinstance(instruction, Send):
                self._reply = transport.send(instruction.buffer, instruction.peer, tag)
                continue
            elif isinstance(instruction, Wait):
                self._pending = instruction.tokens
            elif isinstance(instruction, Native):
                self._pending = (transport.native(instruction, tag),)
            else:
                raise TypeError(f"a schedule yielded {instruction!r}, which is no instruction")
            if not transport.done(self._pending):
                return True

    @property
    def awaited(self) -> set[int]:
        """The peers from which a message is outstanding at this moment."""
        done = self._transport.done
        self._receives = [(peer, token) for peer, token in self._receives if not done((token,))]
        return {peer for peer, _ in self._receives}

    def close(self) -> None:
        """Give the schedule up; its outstanding messages stay where they are."""
        self._schedule.close()
        self.finished = True
        if self._receives or self._pending:
            self._transport.abandon([token for _, token in self._receives], self._pending)


def run(schedule: Schedule, transport: Transport, tag: int = 1) -> Any:
    """Carry a schedule out to its end on this rank, and return what it returns."""
    running = Running(schedule, transport, tag)
    backoff = Backoff()
    while not running.finished:
        if running.advance():
            backoff.reset()
        else:
            backoff.pause()
    return running.result
