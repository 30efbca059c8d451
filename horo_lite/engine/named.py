"""The named lane: operations that ranks may submit in any order, matched by name, agreed before data moves.

Each member sends a request to the first member of the process set (the coordinator) and starts the operation when
the verdict comes back. Both are cached: what was agreed once is asked for by a number of 17 bytes, so that a
synchronous call costs two small messages beside its data. Verdicts arrive in one order on all ranks, and that order
numbers the messages of the operations, any number of which may be under way.
"""

from __future__ import annotations

import itertools
import pickle
from collections import deque

import numpy as np

from horo_lite.engine.agreement import Signature
from horo_lite.engine.control import (
    FIRST_DATA_TAG,
    LAID_OUT,
    NUMBERED,
    PLAIN,
    ControlChannel,
    packed,
)
from horo_lite.engine.coordinator import JOIN, Agreement, Coordinator, Key, Verdict
from horo_lite.engine.fabric import Fabric
from horo_lite.engine.handles import Pending
from horo_lite.engine.operations import Operation, Refusal, stand_in
from horo_lite.engine.short_way import ShortWay
from horo_lite.engine.tuning import describe
from horo_lite.errors import (
    ArgumentError,
    DisagreementError,
    HoroLiteError,
    HorovodInternalError,
    PeerLostError,
    ShutDownError,
)
from horo_lite.interfaces import Schedule, Transport
from horo_lite.transport.driver import Running

_CACHE_CAPACITY = 1024
_AGREEMENTS_KEPT = 4 * _CACHE_CAPACITY


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
        self._names: set[Key] = set()
        self._postponed: list[Operation] = []
        self._running: list[tuple[Running, Operation]] = []
        self._exclusive: deque[tuple[Running, Operation]] = deque()
        # Over TCP, MPICH 5.0 lets a persistent receive from any rank miss messages, from three hosts on.
        one_node = len(fabric.topology.nodes) == 1
        self._control = ControlChannel(self.transport, prepared=one_node)
        self._counters: dict[str, itertools.count[int]] = {}
        self._started = itertools.count()
        self._tags = self.transport.max_tag // 2 - FIRST_DATA_TAG  # the upper half is for messages between two ranks
        self._known: dict[tuple[str, Signature], Agreement] = {}
        self._agreed: dict[int, Agreement] = {}
        self._newest = 0
        self._stirred = False
        self.short_way = ShortWay(self, fabric, self._control, self._coordinator)

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
        """Nothing is waiting or under way here."""
        if not self._stirred:
            return True
        self._stirred = False  # before the look: whoever adds something after it sets this again
        if self._submitted or self._asked or self._running or self._exclusive or self._control.busy:
            self._stirred = True
        return not self._stirred

    def stir(self) -> None:
        """Something is under way, so that this lane needs polling until ``idle`` finds it done."""
        self._stirred = True

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
        first = not self._agreed
        waiting = [*self._submitted, *self._asked.values()]
        running = [operation for _, operation in [*self._running, *self._exclusive]]
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
        if self.transport.size > 1 and (self._receive_control() or self._control.flush()):
            moved = True
        if self._exclusive:
            running, operation = self._exclusive[0]
            if running.finished or self._advance(running, operation):
                moved = True
            if running.finished:
                self._exclusive.popleft()
        if self._running:
            for running, operation in self._running:
                if not running.finished and self._advance(running, operation):
                    moved = True
            self._running = [entry for entry in self._running if not entry[0].finished]
        return moved

    def abandon(self, error: HorovodInternalError | None = None) -> None:
        """Fail everything that is waiting or under way (``shutdown``, or a fault of the transport)."""
        operations = [*self._submitted, *self._postponed, *self._asked.values()]
        operations += [operation for _, operation in [*self._running, *self._exclusive]]
        for operation in operations:
            operation.handle.fail(
                error
                or ShutDownError(
                    f"tensor {operation.handle.name!r} was still under way when Horovod was shut down: "
                    "synchronize every handle before shutdown()"
                )
            )
        for running, _ in [*self._running, *self._exclusive]:
            running.close()
        self._submitted.clear()
        self._postponed.clear()
        self._asked.clear()
        self._names.clear()
        self._running.clear()
        self._exclusive.clear()

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
        known = self.agreement_on(operation)
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
                if agreement is not None and agreement.number in self._agreed:
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
        known = self._agreed[number]
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
            if agreement.number is not None and agreement.number not in self._agreed:
                self._remember(agreement, agreement.number)
            self._start(operation or stand_in(agreement.signatures), agreement, laid_out)
        elif operation is None:
            return
        elif verdict.error is not None:
            operation.handle.fail(DisagreementError(verdict.error))
        else:
            self._counters.clear()  # a joined rank has not counted what others did without a name
            operation.handle.succeed(self._fabric.ranks[verdict.last_joined])

    def _remember(self, agreement: Agreement, number: int) -> None:
        """Keep an agreement under its number; all members do so at the same verdict."""
        self._agreed[number] = agreement
        self._known[agreement.name, agreement.signatures[self._member]] = agreement
        if len(self._known) > _CACHE_CAPACITY:
            del self._known[next(iter(self._known))]
        if len(self._agreed) > _AGREEMENTS_KEPT:
            del self._agreed[next(iter(self._agreed))]
        self._newest = number

    def agreement_on(self, operation: Operation) -> Agreement | None:
        """What the members agreed on before, where the coordinator still knows it when a request by number arrives.

        Until then there may be as many new agreements as operations are under way, and each pushes an old one out.
        """
        known = self._known.get((operation.key.name, operation.signature))
        return known if known is not None and self.remembers(known) else None

    def remembers(self, agreement: Agreement) -> bool:
        """See ``agreement_on``."""
        number = agreement.number
        return number in self._agreed and self._newest - number + len(self._asked) < _AGREEMENTS_KEPT

    def _start(self, operation: Operation, agreement: Agreement, laid_out: bool) -> None:
        timeline = self._fabric.instruments.timeline
        if timeline is not None:
            timeline.begin(operation.handle.name, operation.signature.kind.upper())
        try:
            if laid_out:
                schedule, exclusive = self.short_way.granted_late(operation, agreement), False
            else:
                schedule, exclusive = operation.schedule(agreement.signatures, self._fabric)
        except Exception as error:  # noqa: BLE001  (whoever waits for it gets it)
            next(self._started)  # others use up a tag for it
            operation.handle.fail(as_fault(error, operation.handle.name))
            return
        running = self.begin(schedule)
        self.take_over(running, operation, exclusive)
        if not exclusive or len(self._exclusive) == 1:
            self._advance(running, operation)

    def carry_out(self, schedule: Schedule, exclusive: bool, operation: Operation, polls: int) -> None:
        """Start an operation while nothing else is under way, and stay with it for some polls."""
        running = self.begin(schedule)
        self.take_over(running, operation, exclusive)
        while not running.finished and polls:
            polls -= not self._advance(running, operation)
        if running.finished:
            self._exclusive.clear()
            self._running.clear()

    def begin(self, schedule: Schedule) -> Running:
        """The schedule of an operation that may start, with a tag of its own, the same on every member."""
        return Running(schedule, self.transport, FIRST_DATA_TAG + next(self._started) % self._tags)

    def take_over(self, running: Running, operation: Operation, exclusive: bool = False) -> None:
        """Let a schedule go on with ``progress``; an exclusive one after those before it."""
        (self._exclusive if exclusive else self._running).append((running, operation))
        self.stir()

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
            running.close()
            moved = True
            operation.handle.fail(as_fault(error, operation.handle.name))
        return moved


def as_fault(error: Exception, name: str) -> HoroLiteError:
    """An exception from inside an operation (a user's compressor, no memory) as the error of its handle."""
    if isinstance(error, HoroLiteError):
        return error
    fault = HorovodInternalError(f"tensor {name!r} failed on this rank: {type(error).__name__}: {error}")
    fault.__cause__ = error
    return fault
