"""The short way of a synchronous call: what was agreed on before, with nothing else under way on this rank.

The caller waits for each message right here, in its own thread, and what can be made once is kept: the memory of the
messages, views of it, the arithmetic, and by what arguments a call is known again. An all-reduce has two forms of it:

- *travelling*: the values of a small tensor travel with the request; the coordinator reduces them and answers with the
  result. Two messages are all.
- *laid out*: on one node, the values lie in shared memory before the request leaves, so that the answer says that
  everybody's do: after it every member reduces its slice, and one fence later reads back the others'.

What needs more than a few polls, or another message than the expected one, turns back to the ordinary way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, cast

import numpy as np

from horo_lite.collectives.shared_memory import laid_out_allreduce, lay_out
from horo_lite.engine.agreement import Signature
from horo_lite.engine.control import NUMBERED, ControlChannel
from horo_lite.engine.coordinator import Agreement, Coordinator, Key
from horo_lite.engine.fabric import Fabric
from horo_lite.engine.handles import Handle
from horo_lite.engine.operations import Operation
from horo_lite.engine.prepared import LaidOut, Prepared, PreparedAllReduce, Travelling
from horo_lite.engine.response_cache import ResponseCache
from horo_lite.interfaces import Array, Schedule

if TYPE_CHECKING:
    from horo_lite.engine.named import NamedLane

_CAPACITY = 1024
_LEAVING_POLLS = 100  # about 0.1 ms: longer than a message takes to a rank that waits for it


class ShortWay:
    """One lane's short way.

    Args:
        lane: takes over what does not come to its end here.
        coordinator: on the first member.

    Attributes:
        most_bytes: the largest tensors for which ``repeat`` can do anything.
    """

    def __init__(
        self,
        lane: NamedLane,
        fabric: Fabric,
        control: ControlChannel,
        cache: ResponseCache,
        coordinator: Coordinator | None,
    ) -> None:
        self.most_bytes = fabric.settled_bytes
        shelf_bytes = max(0, -(-fabric.travelling_bytes // 16) * 16)  # each aligned for any type
        self._shelves = np.empty((fabric.size if coordinator is not None else 0, shelf_bytes), np.uint8)
        self._lane = lane
        self._fabric = fabric
        self._instruments = fabric.instruments
        self._control = control
        self._mailbox = control.mailbox
        self._cache = cache
        self._coordinator = coordinator
        self._size = fabric.size
        self._outgoing_header = memoryview(self._mailbox.outgoing)[: NUMBERED.size]
        self._incoming_header = memoryview(self._mailbox.incoming)[: NUMBERED.size]
        self._turn = 0  # 0 or 1; changes with every grant of what was laid out, alike on all members
        self._by_number: dict[Hashable, PreparedAllReduce] = {}
        self._by_arguments: dict[Hashable, PreparedAllReduce] = {}

    def call(self, operation: Operation, polls: int, arguments: Hashable = None) -> bool:
        """Any operation that was agreed on before.

        Args:
            arguments: by which ``repeat`` finds the same call again; None where it should not.

        Returns:
            False when the operation must be submitted; True when it is finished or under way.
        """
        self._lane.name(operation)
        agreement = self._cache.find(operation.key.name, operation.signature) if self._is_open(polls) else None
        if agreement is None:
            return False
        values = operation.values()
        known = self._known(agreement, operation.signature, 0 if values is None else values.nbytes)
        if isinstance(known, PreparedAllReduce) and arguments is not None:
            _keep(self._by_arguments, arguments, known)
        header = known.numbered(operation.key.counter)
        result = self._exchange(known, header, values, lambda: operation, polls)
        if result is None:
            prepare = self.granted if isinstance(known, LaidOut) else self._fabric.start
            self._lane.carry_out(operation, agreement, prepare, polls)
        elif result is not operation:
            operation.target(self._fabric)[:] = result
            operation.handle.succeed(operation.result())
        return True

    def repeat(
        self,
        arguments: Hashable,
        name: str | None,
        values: Array,
        target: Array,
        make: Callable[[], Operation],
        polls: int,
    ) -> Handle | bool:
        """An all-reduce that ``call`` has done before under the same ``arguments``.

        Args:
            name: None for the next one of its kind.
            values: what is reduced.
            target: where the result goes, of the same shape; it may be ``values``.
            make: the operation, with the same target, should it have to go on in the ordinary way.

        Returns:
            True when the result is in ``target``; False when the operation must be made and called; else the
            handle of an operation that is under way.
        """
        try:
            known = self._by_arguments.get(arguments)
        except TypeError:  # something in it has no hash
            return False
        lane, instruments = self._lane, self._instruments
        if known is None or instruments.timeline is not None:
            return False
        if not ((lane.idle or self._has_left()) and self._cache.holds(known.agreement)):
            return False
        header = known.header
        if not name:
            key = lane.next_key("allreduce")
            header = known.numbered(key.counter)
            make = functools.partial(_numbered, make, key)
        if values.ndim != 1:
            values, target = values.reshape(-1), target.reshape(-1)
        result = self._exchange(known, header, values, make, polls)
        if isinstance(result, Operation):
            return result.handle
        if result is None:
            return self._go_on(known, values, target, make, polls)
        target[:] = result
        self._count(known)
        return True

    def granted(self, operation: Operation, agreement: Agreement) -> tuple[Schedule, bool]:
        """The rest of an operation that was laid out here, once everyone's was; not exclusive."""
        known = cast("LaidOut", self._by_number[agreement.number])
        return self._reduce(known, operation.values(), operation.target(self._fabric)), False

    def _go_on(
        self, known: PreparedAllReduce, values: Array, target: Array, make: Callable[[], Operation], polls: int
    ) -> Handle | bool:
        """What ``repeat`` does when the operation may start. Returns as it does."""
        if not isinstance(known, LaidOut):
            operation = make()
            self._lane.carry_out(operation, known.agreement, self._fabric.start, polls)
            return operation.handle
        running = self._lane.begin(self._reduce(known, values, target))
        while polls and not running.finished:
            polls -= not running.advance()
        if running.finished:
            self._count(known)
            return True
        operation = make()
        operation.target(self._fabric)
        self._lane.take_over(running, operation)
        return operation.handle

    def _count(self, known: PreparedAllReduce) -> None:
        stats = self._instruments.stats
        stats.dense_bytes += known.dense_bytes
        stats.payload_bytes += known.dense_bytes

    def _reduce(self, known: LaidOut, values: Array, target: Array) -> Schedule:
        """The rest of an all-reduce whose values every member has laid out."""
        areas = known.areas[self._turn]
        self._turn = 1 - self._turn
        self._instruments.stats.shared_bytes += (
            (self._size - 1) * known.dense_bytes if known.whole else self._fabric.shared_bytes(values)
        )
        return laid_out_allreduce(self._fabric.group, values, target, areas, known.kernel, known.whole)

    def _is_open(self, polls: int) -> bool:
        alone = self._size == 1
        return (alone or polls > 0) and self._instruments.timeline is None and (self._lane.idle or self._has_left())

    def _has_left(self) -> bool:
        """All that kept the lane from being idle was a message, and it has left by now."""
        return self._control.flush() and self._lane.idle

    def _known(self, agreement: Agreement, signature: Signature, nbytes: int) -> Prepared:
        """An agreement in the form in which ``nbytes`` of values go the short way; 0 for none."""
        found = self._by_number.get(agreement.number)
        if found is not None:
            return found
        if 0 < nbytes <= self._fabric.travelling_bytes:
            found = Travelling(agreement, signature, self._size, self._mailbox, self._shelves)
        elif 0 < nbytes <= self._fabric.laid_out_bytes and self._fabric.laid_out_areas:
            found = LaidOut(agreement, signature, self._fabric)
        else:
            return Prepared(agreement)
        _keep(self._by_number, agreement.number, found)
        return found

    def _exchange(
        self, known: Prepared, header: bytes, values: Array, make: Callable[[], Operation], polls: int
    ) -> Array | Operation | None:
        """Ask, and wait for the answer.

        Returns:
            The result, in memory that the next message overwrites; None where none came along and the operation starts
            now; or the operation, which the lane has taken over since other members are late.
        """
        if isinstance(known, LaidOut):
            lay_out(self._fabric.group, values, known.areas[self._turn], known.kernel, known.whole)
        if self._coordinator is not None:
            return self._collect(self._coordinator, known, header, values, make, polls)
        travelling = known if isinstance(known, Travelling) else None
        self._outgoing_header[:] = header
        if travelling is None:
            self._post(NUMBERED.size, 0)
        else:
            travelling.outgoing[:] = values
            self._post(travelling.message_bytes, 0)
        receive = self._mailbox.receive
        received = None
        while received is None and polls:
            received = receive()
            polls -= 1
        if received is not None and self._incoming_header == header:
            return None if travelling is None or received[1] == NUMBERED.size else travelling.incoming
        operation = make()
        self._lane.expect(operation)
        self._hand_over(received)
        return operation

    def _collect(
        self,
        coordinator: Coordinator,
        known: Prepared,
        header: bytes,
        values: Array,
        make: Callable[[], Operation],
        polls: int,
    ) -> Array | Operation | None:
        """On the coordinator: wait for all members to ask for the same, and tell them. Returns as ``_exchange``."""
        travelling = known if isinstance(known, Travelling) else None
        inputs = [] if travelling is None else [values] * self._size
        with np.errstate(all="ignore"):  # here, where there is time
            asked, received = self._await(header, travelling, inputs, polls)
            if len(asked) == self._size:
                self._outgoing_header[:] = header
                if travelling is None or not inputs:
                    self._post(NUMBERED.size, *asked[1:])
                    return None
                travelling.combine(travelling.outgoing, inputs, True)
                self._post(travelling.message_bytes, *asked[1:])
                return travelling.outgoing
        operation = make()
        self._lane.expect(operation)
        for member in asked:
            self._lane.announce(coordinator.ask(member, operation.key, known.agreement))
        self._hand_over(received)
        return operation

    def _await(
        self, header: bytes, travelling: Travelling | None, inputs: list[Array], polls: int
    ) -> tuple[list[int], tuple[int, int] | None]:
        """Wait for all members to ask for the same; their values go to ``inputs``, emptied where one has sent none.

        Returns:
            who has asked for it, and where the mailbox holds something else, that message's sender and length.
        """
        asked = [0]
        receive = self._mailbox.receive
        while len(asked) < self._size and polls:
            received = receive()
            if received is None:
                polls -= 1
                continue
            if self._incoming_header != header:
                return asked, received
            member, nbytes = received
            asked.append(member)
            if travelling is None or nbytes == NUMBERED.size:
                inputs.clear()
            elif inputs:
                inputs[member] = travelling.incoming
                if len(asked) < self._size:  # the next message comes to the same place
                    inputs[member] = travelling.arrived[member]
                    inputs[member][:] = travelling.incoming
        return asked, None

    def _post(self, nbytes: int, *members: int) -> None:
        for member in members:
            self._mailbox.post(nbytes, member)
        if self._mailbox.posting:
            self._lane.stir()
            if self._coordinator is not None:
                self._see_off()

    def _see_off(self) -> None:
        """The others wait for the answer, which may leave only with polls, and the caller is about to do other work."""
        polls = _LEAVING_POLLS
        while self._mailbox.posting and polls:
            self._mailbox.flush()
            polls -= 1
        if polls == 0:
            self._lane.wake()

    def _hand_over(self, received: tuple[int, int] | None) -> None:
        """Let the lane read what was not expected here."""
        message = None if received is None else self._control.take(*received)
        if message is not None:
            self._lane.read(*message)


def _numbered(make: Callable[[], Operation], key: Key) -> Operation:
    operation = make()
    operation.number(key)
    return operation


def _keep(cache: dict[Hashable, PreparedAllReduce], key: Hashable, known: PreparedAllReduce) -> None:
    if key not in cache and len(cache) >= _CAPACITY:
        del cache[next(iter(cache))]
    cache[key] = known
