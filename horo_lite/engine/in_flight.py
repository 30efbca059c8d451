"""Operations that have started: any number of them at once, each on a message tag of its own."""

from __future__ import annotations

import itertools
from collections import deque

from horo_lite.engine.control import FIRST_DATA_TAG
from horo_lite.engine.instruments import Instruments
from horo_lite.engine.operations import Operation
from horo_lite.errors import PeerLostError
from horo_lite.interfaces import Schedule, Transport
from horo_lite.transport.driver import Running


class InFlight:
    """The started operations of one named lane.

    They start in one order on all members, that of the verdicts, so that counting them gives each the same tag
    everywhere. Those that need the staging memory to themselves (*exclusive* ones) go one after the other.
    """

    def __init__(self, transport: Transport, instruments: Instruments) -> None:
        self._transport = transport
        self._instruments = instruments
        self._started = itertools.count()
        self._tags = transport.max_tag // 2 - FIRST_DATA_TAG  # the upper half is for messages between two ranks
        self._running: list[tuple[Running, Operation]] = []
        self._exclusive: deque[tuple[Running, Operation]] = deque()

    def __bool__(self) -> bool:
        return bool(self._running or self._exclusive)

    def operations(self) -> list[Operation]:
        """All that have not ended."""
        entries = [*self._running, *self._exclusive]
        return [operation for _, operation in entries if not operation.handle.finished]

    def begin(self, schedule: Schedule) -> Running:
        """The schedule of an operation that may start; whoever begins it advances it, or leaves that to ``add``."""
        return Running(schedule, self._transport, FIRST_DATA_TAG + next(self._started) % self._tags)

    def add(self, running: Running, operation: Operation, exclusive: bool = False) -> bool:
        """Let what was begun go on with ``progress``. False for an exclusive one with others before it."""
        if exclusive:
            self._exclusive.append((running, operation))
            return len(self._exclusive) == 1
        self._running.append((running, operation))
        return True

    def stay(self, running: Running, operation: Operation, polls: int) -> None:
        """Poll the only operation in flight some times, or to its end."""
        while not running.finished and polls:
            polls -= not self.advance(running, operation)
        if running.finished:
            self._exclusive.clear()
            self._running.clear()

    def progress(self) -> bool:
        """Let all go on as far as they can. True when anything moved."""
        moved = False
        if self._exclusive:
            running, operation = self._exclusive[0]
            if running.finished or self.advance(running, operation):
                moved = True
            if running.finished:
                self._exclusive.popleft()
        if self._running:
            for running, operation in self._running:
                if not running.finished and self.advance(running, operation):
                    moved = True
            self._running = [entry for entry in self._running if not entry[0].finished]
        return moved

    def close(self) -> None:
        """Give all of them up; their messages stay where they are."""
        for running, _ in [*self._running, *self._exclusive]:
            running.close()
        self._running.clear()
        self._exclusive.clear()

    def advance(self, running: Running, operation: Operation) -> bool:
        """One operation, as far as it goes. A fault in its own work fails it alone; a lost peer fails the lane."""
        try:
            moved = running.advance()
            if running.finished:
                timeline = self._instruments.timeline
                if timeline is not None:
                    timeline.end(operation.handle.name)
                operation.handle.succeed(operation.result())
        except PeerLostError:
            raise
        except Exception as error:  # noqa: BLE001  (whoever waits for it gets it)
            running.close()
            moved = True
            operation.handle.fail_from(error)
        return moved
