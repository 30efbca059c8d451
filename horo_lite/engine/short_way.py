"""The short way of a synchronous call: what was agreed on before, with nothing else under way on this rank.

The caller waits for each message right here, in its own thread. The values of a small all-reduce travel with the
request: the coordinator reduces them and answers with the result, so that two messages are all. Everything that can be
made once is kept: the messages' memory, views of it, the arithmetic, and by what arguments a call is known again.

What needs more than a few polls, or another message than the expected one, turns back to the ordinary way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from horo_lite.arrays import kernel, numpy_dtype
from horo_lite.engine.agreement import Signature
from horo_lite.engine.control import NUMBERED, ControlChannel
from horo_lite.engine.coordinator import Agreement, Coordinator, Key
from horo_lite.engine.fabric import Fabric
from horo_lite.engine.handles import Handle
from horo_lite.engine.operations import Operation
from horo_lite.interfaces import Array, Mailbox, Reduction

if TYPE_CHECKING:
    from horo_lite.engine.named import NamedLane

_CAPACITY = 1024


class _Travelling:
    """A small all-reduce that was agreed on, ready to be asked for again.

    Attributes:
        header: of its messages; the counter is that of a named operation.
        outgoing: its values in the mailbox's memory.
        incoming: the values that the mailbox has received.
        arrived: each member's values, where not all come at once.
    """

    __slots__ = (
        "agreement", "arrived", "combine", "dense_bytes", "header", "incoming", "message_bytes", "outgoing",
    )

    def __init__(
        self, agreement: Agreement, signature: Signature, size: int, mailbox: Mailbox, shelves: Array
    ) -> None:
        dtype = numpy_dtype(signature.types[0])
        self.agreement = agreement
        self.header = NUMBERED.pack(b"#", agreement.number, -1)
        self.dense_bytes = math.prod(signature.shapes[0]) * dtype.itemsize
        self.message_bytes = NUMBERED.size + self.dense_bytes
        self.outgoing: Array = mailbox.outgoing[NUMBERED.size : self.message_bytes].view(dtype)
        self.incoming: Array = mailbox.incoming[NUMBERED.size : self.message_bytes].view(dtype)
        self.arrived: list[Array] = [shelf[: self.dense_bytes].view(dtype) for shelf in shelves]
        reduction = Reduction(signature.reduction)
        self.combine = kernel(signature.types[0], reduction, size, 1.0, signature.postscale).combine_block


class ShortWay:
    """One lane's short way.

    Args:
        lane: takes over what does not come to its end here.
        coordinator: on the first member.
    """

    def __init__(
        self, lane: NamedLane, fabric: Fabric, control: ControlChannel, coordinator: Coordinator | None
    ) -> None:
        self.travelling_bytes = fabric.travelling_bytes
        shelf_bytes = max(0, -(-fabric.travelling_bytes // 16) * 16)  # each aligned for any type
        self._shelves = np.empty((fabric.size if coordinator is not None else 0, shelf_bytes), np.uint8)
        self._lane = lane
        self._fabric = fabric
        self._instruments = fabric.instruments
        self._control = control
        self._mailbox = control.mailbox
        self._coordinator = coordinator
        self._member = fabric.group.index
        self._size = fabric.size
        self._outgoing_header = memoryview(self._mailbox.outgoing)[: NUMBERED.size]
        self._incoming_header = memoryview(self._mailbox.incoming)[: NUMBERED.size]
        self._by_number: dict[int | None, _Travelling] = {}
        self._by_arguments: dict[Hashable, _Travelling] = {}

    def repeat(
        self,
        arguments: Hashable,
        name: str | None,
        values: Array,
        target: Array,
        make: Callable[[], Operation],
        polls: int,
    ) -> Handle | bool:
        """A small all-reduce that ``call`` has done before under the same ``arguments``.

        Args:
            name: None for the next one of its kind.
            values: what is reduced.
            target: where the result goes, of the same shape; it may be ``values``.
            make: the operation, should it have to go on in the ordinary way.

        Returns:
            True when the result is in ``target``; False when the operation must be made and called; else the
            handle of an operation that is under way.
        """
        try:
            travelling = self._by_arguments.get(arguments)
        except TypeError:  # something in it has no hash
            return False
        lane = self._lane
        if travelling is None or not (lane.idle and lane.remembers(travelling.agreement)):
            return False
        stats, header = self._instruments.stats, travelling.header
        if self._instruments.timeline is not None:
            return False
        if not name:
            key = lane.next_key("allreduce")
            header = NUMBERED.pack(b"#", travelling.agreement.number, key.counter)
            make = functools.partial(_numbered, make, key)
        if values.ndim != 1:
            values, target = values.reshape(-1), target.reshape(-1)
        result = self._exchange(travelling.agreement, header, travelling, values, make, polls)
        if type(result) is np.ndarray:
            target[:] = result
            stats.dense_bytes += travelling.dense_bytes
            stats.payload_bytes += travelling.dense_bytes
            return True
        operation = make() if result is None else result
        if result is None:
            lane.carry_out(operation, travelling.agreement, polls)
        return operation.handle

    def call(self, operation: Operation, polls: int, arguments: Hashable = None) -> bool:
        """Any operation that was agreed on before.

        Args:
            arguments: by which ``repeat`` finds the same call again; None where it should not.

        Returns:
            False when the operation must be submitted; True when it is finished or under way.
        """
        self._lane.name(operation)
        agreement = self._lane.agreement_on(operation)
        if agreement is None or not self._is_open(polls):
            return False
        values = operation.values(self._fabric)
        travelling = None if values is None else self._travelling(agreement, operation.signature)
        if travelling is not None and arguments is not None:
            _keep(self._by_arguments, arguments, travelling)
        header = NUMBERED.pack(b"#", agreement.number, operation.key.counter)
        result = self._exchange(agreement, header, travelling, values, lambda: operation, polls)
        if result is None:
            self._lane.carry_out(operation, agreement, polls)
        elif result is not operation:
            operation.absorb(result, self._fabric)
            operation.handle.succeed(operation.result())
        return True

    def _is_open(self, polls: int) -> bool:
        alone = self._size == 1
        return (alone or polls > 0) and self._lane.idle and self._instruments.timeline is None

    def _travelling(self, agreement: Agreement, signature: Signature) -> _Travelling:
        number = agreement.number
        found = self._by_number.get(number)
        if found is None:
            found = _Travelling(agreement, signature, self._size, self._mailbox, self._shelves)
            _keep(self._by_number, number, found)
        return found

    def _exchange(
        self,
        agreement: Agreement,
        header: bytes,
        travelling: _Travelling | None,
        values: Array,
        make: Callable[[], Operation],
        polls: int,
    ) -> Array | Operation | None:
        """Ask, and wait for the answer.

        Returns:
            The result, in memory that the next message overwrites; None where none came along and the operation starts
            now; or the operation, which the lane has taken over since other members are late.
        """
        if self._coordinator is not None:
            return self._collect(self._coordinator, agreement, header, travelling, values, make, polls)
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
        agreement: Agreement,
        header: bytes,
        travelling: _Travelling | None,
        values: Array,
        make: Callable[[], Operation],
        polls: int,
    ) -> Array | Operation | None:
        """On the coordinator: wait for all members to ask for the same, and tell them. Returns as ``_exchange``."""
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
            self._lane.announce(coordinator.ask(member, operation.key, agreement))
        self._hand_over(received)
        return operation

    def _await(
        self, header: bytes, travelling: _Travelling | None, inputs: list[Array], polls: int
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

    def _hand_over(self, received: tuple[int, int] | None) -> None:
        """Let the lane read what was not expected here."""
        message = None if received is None else self._control.take(*received)
        if message is not None:
            self._lane.read(*message)


def _numbered(make: Callable[[], Operation], key: Key) -> Operation:
    operation = make()
    operation.number(key)
    return operation


def _keep(cache: dict[Any, _Travelling], key: Hashable, travelling: _Travelling) -> None:
    if key not in cache and len(cache) >= _CAPACITY:
        del cache[next(iter(cache))]
    cache[key] = travelling
