"""The named lane: operations that ranks may submit in any order, matched by name, agreed before data moves.

Each member sends a request to the first member of the process set (the coordinator) and starts the operation when
the verdict comes back. Both are cached: what was agreed once is asked for by a number of 17 bytes, so that a
synchronous call costs two small messages beside its data. Verdicts arrive in one order on all ranks, and that order
numbers the messages of the operations, any number of which may be under way.
"""

from __future__ import annotations

import itertools
import pickle
import struct
from collections import deque
from typing import Any

import numpy as np

from horo_lite.engine.agreement import Signature
from horo_lite.engine.coordinator import Agreement, Coordinator, Key, Verdict
from horo_lite.engine.fabric import Fabric
from horo_lite.engine.operations import Operation, stand_in
from horo_lite.errors import (
    DisagreementError,
    HoroLiteError,
    HorovodInternalError,
    PeerLostError,
    ShutDownError,
)
from horo_lite.interfaces import Array, Token, Transport
from horo_lite.transport.driver import Running

_CONTROL_TAG = 0
_FIRST_DATA_TAG = 1
_CACHE_CAPACITY = 1024
_CACHED = struct.Struct("<cqq")  # b"#", number of the cached agreement, counter


class NamedLane:
    """One process set's named operations on this rank.

    Args:
        fabric: the process set's transport, layout and choice of algorithms.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.transport: Transport = fabric.transport
        self._member = self.transport.rank
        self._coordinator = Coordinator(fabric.ranks) if self._member == 0 else None
        self._submitted: deque[Operation] = deque()
        self._asked: dict[Key, Operation] = {}
        self._running: list[tuple[Running, Operation]] = []
        self._exclusive: deque[tuple[Running, Operation]] = deque()
        self._arriving: deque[tuple[Token, Array, int]] = deque()
        self._leaving: deque[Token] = deque()
        self._counters: dict[str, itertools.count[int]] = {}
        self._started = itertools.count()
        self._tags = self.transport.max_tag - _FIRST_DATA_TAG
        self._known: dict[tuple[str, Signature], Agreement] = {}
        self._agreed: dict[int, Agreement] = {}

    # --- what the engine calls -----------------------------------------------------------------------------------

    def submit(self, operation: Operation) -> None:
        """Hand an operation in, from any thread; it is taken up at the next ``progress``."""
        if not operation.key.name:
            kind = operation.signature.kind
            counter = self._counters.setdefault(kind, itertools.count())
            operation.key = Key(f"{kind}.noname", next(counter))
            operation.handle.name = str(operation.key)
        self._submitted.append(operation)

    @property
    def idle(self) -> bool:
        """Nothing is waiting or under way here."""
        return not (self._submitted or self._asked or self._running or self._exclusive)

    @property
    def waiting(self) -> dict[Key, list[int]]:
        """Operations that wait for other ranks: on the coordinator with those ranks, elsewhere with none named."""
        if self._coordinator is not None:
            return self._coordinator.waiting
        return {key: [] for key in self._asked}

    def progress(self) -> bool:
        """Do all that can be done without waiting. Returns True when anything moved."""
        moved = False
        while self._submitted:
            self._ask(self._submitted.popleft())
            moved = True
        if self.transport.size > 1 and self._receive_control():
            moved = True
        if self._exclusive and self._advance(*self._exclusive[0]):
            moved = True
            if self._exclusive[0][0].finished:
                self._exclusive.popleft()
        if self._running:
            for running, operation in self._running:
                if self._advance(running, operation):
                    moved = True
            self._running = [entry for entry in self._running if not entry[0].finished]
        return moved

    def abandon(self, error: HorovodInternalError | None = None) -> None:
        """Fail everything that is waiting or under way (``shutdown``, or a fault of the transport)."""
        operations = [*self._submitted, *self._asked.values()]
        operations += [operation for _, operation in [*self._running, *self._exclusive]]
        for operation in operations:
            operation.handle.fail(
                error
                or ShutDownError(
                    f"tensor {operation.handle.name!r} was still under way when Horovod was shut down: "
                    "synchronize every handle before shutdown()"
                )
            )
        self._submitted.clear()
        self._asked.clear()
        self._running.clear()
        self._exclusive.clear()

    # --- requests and verdicts -----------------------------------------------------------------------------------

    def _ask(self, operation: Operation) -> None:
        key, signature = operation.key, operation.signature
        if key in self._asked:
            operation.handle.fail(
                HorovodInternalError(
                    f"tensor {str(key)!r} is already under way on this rank: wait for it before its name is used "
                    "again, or give each tensor a name of its own"
                )
            )
            return
        self._asked[key] = operation
        timeline = self._fabric.instruments.timeline
        if timeline is not None:
            timeline.begin(str(key), f"NEGOTIATE_{signature.kind.upper()}")
        known = self._known.get((key.name, signature))
        if self._coordinator is not None:
            self._announce(self._coordinator.ask(0, key, signature if known is None else known))
        elif known is None:
            self._send_control(pickle.dumps((key, signature)), 0)
        else:
            self._send_control(_CACHED.pack(b"#", known.number, key.counter), 0)

    def _announce(self, verdicts: list[Verdict]) -> None:
        """On the coordinator: tell the members, in one order for all."""
        for verdict in verdicts:
            if self.transport.size > 1:
                agreement = verdict.agreement
                if agreement is not None and agreement.number in self._agreed:
                    message = _CACHED.pack(b"#", agreement.number, verdict.key.counter)
                else:
                    message = pickle.dumps(verdict)
                for member in range(1, self.transport.size):
                    self._send_control(message, member)
            self._act(verdict)

    def _receive_control(self) -> bool:
        moved = False
        while (message := self.transport.probe(_CONTROL_TAG)) is not None:
            buffer = np.empty(message.size_bytes, np.uint8)
            token = self.transport.recv(buffer, message.peer, _CONTROL_TAG)
            self._arriving.append((token, buffer, message.peer))
        while self._arriving and self.transport.done(self._arriving[0][:1]):
            _, buffer, peer = self._arriving.popleft()
            self._read(buffer.tobytes(), peer)
            moved = True
        while self._leaving and self.transport.done((self._leaving[0],)):
            self._leaving.popleft()
        return moved

    def _read(self, message: bytes, peer: int) -> None:
        known = None
        if len(message) == _CACHED.size and message[:1] == b"#":
            _, number, counter = _CACHED.unpack(message)
            known = self._agreed[number]
            key = Key(known.name, counter)
        if self._coordinator is None:
            self._act(pickle.loads(message) if known is None else Verdict(key, known))
            return
        if known is None:
            key, asked = pickle.loads(message)
            self._announce(self._coordinator.ask(peer, key, asked))
        else:
            self._announce(self._coordinator.ask(peer, key, known))

    def _send_control(self, message: bytes, member: int) -> None:
        self._leaving.append(
            self.transport.send(np.frombuffer(message, np.uint8), member, _CONTROL_TAG)
        )

    # --- carrying out --------------------------------------------------------------------------------------------

    def _act(self, verdict: Verdict) -> None:
        """Every member, for every verdict, in the same order: start the operation or fail it."""
        operation = self._asked.pop(verdict.key, None)
        agreement = verdict.agreement
        timeline = self._fabric.instruments.timeline
        if timeline is not None:
            timeline.end(str(verdict.key))
        if agreement is not None:
            if agreement.number is not None and agreement.number not in self._agreed:
                self._remember(agreement, agreement.number)
            self._start(operation or stand_in(agreement.signatures), agreement)
        elif operation is None:
            return
        elif verdict.error is not None:
            operation.handle.fail(DisagreementError(verdict.error))
        else:
            operation.handle.succeed(self._fabric.ranks[verdict.last_joined])

    def _remember(self, agreement: Agreement, number: int) -> None:
        """Keep an agreement under its number; all members do so at the same verdict."""
        self._agreed[number] = agreement
        self._known[agreement.name, agreement.signatures[self._member]] = agreement
        if len(self._known) > _CACHE_CAPACITY:
            del self._known[next(iter(self._known))]
        if len(self._agreed) > 64 * _CACHE_CAPACITY:
            del self._agreed[next(iter(self._agreed))]

    def _start(self, operation: Operation, agreement: Agreement) -> None:
        tag = _FIRST_DATA_TAG + next(self._started) % self._tags
        timeline = self._fabric.instruments.timeline
        if timeline is not None:
            timeline.begin(operation.handle.name, operation.signature.kind.upper())
        try:
            schedule, exclusive = operation.schedule(agreement.signatures, self._fabric)
        except Exception as error:  # noqa: BLE001  (whoever waits for it gets it)
            operation.handle.fail(as_fault(error, operation.handle.name))
            return
        running = Running(schedule, self.transport, tag)
        if exclusive:
            self._exclusive.append((running, operation))
            if len(self._exclusive) > 1:
                return
        self._advance(running, operation)
        if running.finished:
            if exclusive:
                self._exclusive.popleft()
        elif not exclusive:
            self._running.append((running, operation))

    def _advance(self, running: Running, operation: Operation) -> bool:
        """One operation, as far as it goes. A fault in its own work fails it alone; a lost peer fails the lane."""
        try:
            moved = running.advance()
            if running.finished:
                timeline = self._fabric.instruments.timeline
                if timeline is not None:
                    timeline.end(operation.handle.name)
                operation.handle.succeed(operation.result())
        except PeerLostError:
            raise
        except Exception as error:  # noqa: BLE001  (whoever waits for it gets it)
            running.finished = moved = True
            operation.handle.fail(as_fault(error, operation.handle.name))
        return moved


def as_fault(error: Exception, name: str) -> HoroLiteError:
    """An exception from inside an operation (a user's compressor, no memory) as the error of its handle."""
    if isinstance(error, HoroLiteError):
        return error
    fault = HorovodInternalError(f"tensor {name!r} failed on this rank: {type(error).__name__}: {error}")
    fault.__cause__ = error
    return fault


def describe(waiting: dict[Key, Any]) -> str:
    """The names of waiting operations, for messages: at most six."""
    names = [str(key) for key in waiting]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
