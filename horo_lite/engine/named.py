"""The named lane: operations that ranks may submit in any order, matched by name, agreed before data moves.

Each member sends a request to the first member of the process set (the coordinator) and starts the operation when
the verdict comes back. What was agreed on once is asked for, and granted, by its number (``response_cache``), so that
a synchronous call costs two messages of 24 bytes beside its data. Verdicts arrive in one order on all ranks, and that
order numbers the messages of the operations, any number of which may be under way (``in_flight``).
"""

from __future__ import annotations

import itertools
import pickle
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from horo_lite.engine.control import LAID_OUT, NUMBERED, PLAIN, ControlChannel, packed
from horo_lite.engine.coordinator import JOIN, Agreement, Coordinator, Key, Verdict
from horo_lite.engine.fabric import Fabric
from horo_lite.engine.handles import Pending
from horo_lite.engine.in_flight import InFlight
from horo_lite.engine.operations import Operation, Refusal, stand_in
from horo_lite.engine.response_cache import ResponseCache
from horo_lite.engine.short_way import ShortWay
from horo_lite.engine.tuning import describe
from horo_lite.errors import ArgumentError, DisagreementError, HorovodInternalError, ShutDownError
from horo_lite.interfaces import Schedule, Transport
from horo_lite.transport.driver import Running

Prepare: TypeAlias = Callable[[Operation, Agreement], tuple[Schedule, bool]]
"""What makes an operation's schedule, and says whether it is exclusive (``InFlight``)."""


class NamedLane:
    """One process set's named operations on this rank.

    Args:
        fabric: the process set's transport, layout and choice of algorithms.
        wake: lets another thread poll this lane, where a caller leaves something under way.
    """

    def __init__(self, fabric: Fabric, wake: Callable[[], None] = lambda: None) -> None:
        self._fabric = fabric
        self.wake = wake
        self.transport: Transport = fabric.transport
        self._coordinator = Coordinator(fabric.ranks) if self.transport.rank == 0 else None
        self._submitted: deque[Operation] = deque()
        self._asked: dict[Key, Operation] = {}
        self._names: set[Key] = set()
        self._postponed: list[Operation] = []
        self._in_flight = InFlight(self.transport, fabric.instruments)
        # Over TCP, MPICH 5.0 lets a persistent receive from any rank miss messages, from three hosts on.
        one_node = len(fabric.topology.nodes) == 1
        self._control = ControlChannel(self.transport, prepared=one_node)
        self._counters: dict[str, itertools.count[int]] = {}
        self._cache = ResponseCache(self.transport.rank)
        self._stirred = self._settled = object()
        self.short_way = ShortWay(self, fabric, self._control, self._cache, self._coordinator)

    def choices(self) -> str:
        """Which algorithms all-reduces take here, for people; "" until the first larger one has settled it."""
        table = self._fabric.table
        return "" if table is None else describe(table, self._fabric)

    # --- what the engine calls -----------------------------------------------------------------------------------

    def submit(self, operation: Operation) -> None:
        """Hand an operation in, from any thread; it is taken up at the next ``progress``.

        Raises:
            ValueError: an operation of this name waits for other ranks already.
        """
        self.name(operation)
        if not isinstance(operation, Refusal):
            if operation.key in self._names:
                raise ArgumentError(
                    f"tensor {str(operation.key)!r} is already under way on this rank: wait for it before its name "
                    "is used again, or give each tensor a name of its own"
                )
            self._names.add(operation.key)
        self._submitted.append(operation)
        self.stir()

    def name(self, operation: Operation) -> None:
        """Number an operation that has no name of its own."""
        if not operation.key.name:
            operation.number(self.next_key(operation.signature.kind))

    def next_key(self, kind: str) -> Key:
        """What the next unnamed operation of a kind is matched by."""
        counter = self._counters.setdefault(kind, itertools.count())
        return Key(f"{kind}.noname", next(counter))

    @property
    def idle(self) -> bool:
        """Nothing is waiting or under way here. Any thread may ask, also while another one polls."""
        stirred = self._stirred
        if stirred is self._settled:
            return True
        if self._submitted or self._asked or self._in_flight or self._control.busy:
            return False
        self._settled = stirred  # whoever has added something since has stirred anew
        return True

    def stir(self) -> None:
        """Something is under way, so that this lane needs polling until ``idle`` finds it done."""
        self._stirred = object()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global rank of each member."""
        return self._fabric.ranks

    @property
    def joined(self) -> bool:
        """This rank is in ``join()``."""
        return JOIN in self._asked

    def pending(self) -> list[Pending]:
        """What is submitted and not finished; for the watch, whose thread does not hold the engine's lock."""
        first = not self._cache
        waiting = [*self._submitted, *self._asked.values()]
        running = self._in_flight.operations()
        return [
            Pending(str(each.key), each.signature.kind, each.handle.waiting, index >= len(waiting), first)
            for index, each in enumerate([*waiting, *running])
        ]

    def progress(self) -> bool:
        """Do all that can be done without waiting. Returns True when anything moved."""
        moved = False
        while self._submitted:
            self._ask(self._submitted.popleft())
            moved = True
        if self.transport.size > 1:
            received = self._receive_control()
            moved = self._control.flush() or received or moved
        if self._in_flight.progress():
            moved = True
        return moved

    def abandon(self, error: HorovodInternalError | None = None) -> None:
        """Fail everything that is waiting or under way (``shutdown``, or a fault of the transport)."""
        waiting = [*self._submitted, *self._postponed, *self._asked.values()]
        for operation in [*waiting, *self._in_flight.operations()]:
            operation.handle.fail(
                error
                or ShutDownError(
                    f"tensor {operation.handle.name!r} was still under way at shutdown(): "
                    "synchronize every handle before it"
                )
            )
        self._in_flight.close()
        self._submitted.clear()
        self._postponed.clear()
        self._asked.clear()
        self._names.clear()

    # --- requests and verdicts -----------------------------------------------------------------------------------

    def _ask(self, operation: Operation) -> None:
        key, signature = operation.key, operation.signature
        if key in self._asked:  # by a call with wrong arguments, of which the others have not heard yet
            self._postponed.append(operation)
            return
        self._asked[key] = operation
        timeline = self._fabric.instruments.timeline
        if timeline is not None:
            timeline.begin(str(key), f"NEGOTIATE_{signature.kind.upper()}")
        known = self._cache.find(key.name, signature, len(self._asked))
        if self._coordinator is not None:
            self.announce(self._coordinator.ask(0, key, signature if known is None else known))
        elif known is None:
            self._control.send(packed((key, signature)), 0)
        else:
            self._control.send(NUMBERED.pack(PLAIN, known.number, key.counter), 0)

    def expect(self, operation: Operation) -> None:
        """This rank has asked for an operation: it begins when the verdict comes."""
        self._asked[operation.key] = operation
        self._names.add(operation.key)
        self.stir()

    def announce(self, verdicts: list[Verdict]) -> None:
        """On the coordinator: tell the members, in one order for all."""
        for verdict in verdicts:
            if self.transport.size > 1:
                agreement = verdict.agreement
                if agreement is not None and agreement.number in self._cache:
                    message = NUMBERED.pack(PLAIN, agreement.number, verdict.key.counter)
                else:
                    message = packed(verdict)
                for member in range(1, self.transport.size):
                    self._control.send(message, member)
            self._act(verdict)

    def _receive_control(self) -> bool:
        moved = False
        while (received := self._control.receive()) is not None:
            self.read(*received)
            moved = True
        return moved

    def read(self, message: bytes, peer: int) -> None:
        """A request, on the coordinator, or a verdict."""
        if message[:1] not in (PLAIN, LAID_OUT):
            if self._coordinator is None:
                self._act(pickle.loads(message))
            else:
                key, asked = pickle.loads(message)
                self.announce(self._coordinator.ask(peer, key, asked))
            return
        mark, number, counter = NUMBERED.unpack_from(message)
        known = self._cache[number]
        key = Key(known.name, counter)
        if self._coordinator is not None:  # values that came along are sent again, now that ranks did not meet at once
            self.announce(self._coordinator.ask(peer, key, known))
        elif len(message) > NUMBERED.size:
            operation = self._asked.pop(key)
            self._names.discard(key)
            target = operation.target(self._fabric)
            target[:] = np.frombuffer(message, target.dtype, offset=NUMBERED.size)
            operation.handle.succeed(operation.result())
        else:
            self._act(Verdict(key, known), mark == LAID_OUT)

    # --- carrying out --------------------------------------------------------------------------------------------

    def _act(self, verdict: Verdict, laid_out: bool = False) -> None:
        """Every member, for every verdict, in the same order: start the operation or fail it."""
        operation = self._asked.pop(verdict.key, None)
        self._names.discard(verdict.key)
        if self._postponed:
            self._submitted.extend(self._postponed)
            self._postponed.clear()
        agreement = verdict.agreement
        timeline = self._fabric.instruments.timeline
        if timeline is not None:
            timeline.end(str(verdict.key))
        if agreement is not None:
            self._cache.remember(agreement)
            self._start(operation or stand_in(agreement.signatures), agreement, laid_out)
        elif operation is None:
            return
        elif verdict.error is not None:
            operation.handle.fail(DisagreementError(verdict.error))
        else:
            self._counters.clear()  # a joined rank has not counted what others did without a name
            operation.handle.succeed(self._fabric.ranks[verdict.last_joined])

    def _start(self, operation: Operation, agreement: Agreement, laid_out: bool) -> None:
        timeline = self._fabric.instruments.timeline
        if timeline is not None:
            timeline.begin(operation.handle.name, operation.signature.kind.upper())
        prepare = self.short_way.granted if laid_out else self._fabric.start
        running, may_go_on = self._begin(operation, agreement, prepare)
        if may_go_on:
            self._in_flight.advance(running, operation)

    def carry_out(self, operation: Operation, agreement: Agreement, prepare: Prepare, polls: int) -> None:
        """Start an operation while nothing else is under way, and stay with it for some polls."""
        running, _ = self._begin(operation, agreement, prepare)
        self._in_flight.stay(running, operation, polls)

    def _begin(self, operation: Operation, agreement: Agreement, prepare: Prepare) -> tuple[Running, bool]:
        """Begin an operation; one that this rank can't do fails in its turn, like one that fails midway.

        Returns:
            it, and whether it may go on at once.
        """
        try:
            schedule, exclusive = prepare(operation, agreement)
        except Exception as error:  # noqa: BLE001  (whoever waits for it gets it)
            schedule, exclusive = _failing(error), False
        running = self.begin(schedule)
        return running, self.take_over(running, operation, exclusive)

    def begin(self, schedule: Schedule) -> Running:
        """The schedule of an operation that may start: whoever begins it advances it, or lets the lane take it over."""
        return self._in_flight.begin(schedule)

    def take_over(self, running: Running, operation: Operation, exclusive: bool = False) -> bool:
        """Let what was begun go on with ``progress``. Returns whether it may go on at once (``InFlight.add``)."""
        may_go_on = self._in_flight.add(running, operation, exclusive)
        self.stir()
        return may_go_on


def _failing(error: Exception) -> Schedule:
    raise error
    yield
