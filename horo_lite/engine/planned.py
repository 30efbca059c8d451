"""The planned lane: buckets that all ranks reduce in one order, agreed once; nothing is negotiated per step.

Operations are carried out one after the other. Every message, fences included, carries (plan, step, bucket) in its
tag, so that ranks out of step are found out without a message more: when the next message from a rank that this one
waits for has another tag, that rank has gone another way, and it finds the same of this one.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Container
from typing import NamedTuple, Protocol

import numpy as np

from horo_lite.engine.fabric import Fabric
from horo_lite.engine.handles import Handle, Pending
from horo_lite.errors import DisagreementError, HorovodInternalError, PeerLostError, ShutDownError
from horo_lite.interfaces import Schedule, Token, Transport
from horo_lite.transport.driver import Running

_CHECK_AFTER_S = 0.05  # of waiting: looking for strangers costs a poll, and being out of step is rare


class Place(NamedTuple):
    """Where a rank is: the number of a plan, a step of it, a bucket. Plan 0 is the making of a new plan."""

    plan: int
    step: int
    bucket: int


class Tagging:
    """Places as message tags and back, as far as a tag's bits go.

    Args:
        max_tag: the transport's; at least 2**15 - 1, as MPI guarantees.
    """

    def __init__(self, max_tag: int) -> None:
        bits = (max_tag + 1).bit_length() - 1
        self._step_bits = bits // 4
        self._bucket_bits = bits * 2 // 5
        self._plan_bits = bits - self._step_bits - self._bucket_bits
        self.alarm = (1 << self._step_bits + self._bucket_bits) - 1  # places in plan 0 that are never reached
        self.call = self.alarm - 1

    def tag(self, place: Place) -> int:
        """The tag of a place; only plan 0 has plan bits of 0."""
        plan = place.plan and 1 + (place.plan - 1) % ((1 << self._plan_bits) - 1)
        step = place.step & ((1 << self._step_bits) - 1)
        bucket = place.bucket & ((1 << self._bucket_bits) - 1)
        return (plan << self._step_bits | step) << self._bucket_bits | bucket

    def place(self, tag: int) -> Place:
        """The place of a tag, its numbers modulo what fits."""
        bucket = tag & ((1 << self._bucket_bits) - 1)
        step = tag >> self._bucket_bits & ((1 << self._step_bits) - 1)
        return Place(tag >> self._bucket_bits + self._step_bits, step, bucket)


class Plan(Protocol):
    """What the lane knows of a plan: its label and number, and how a joined rank takes part in it.

    ``in_use``: this rank may still step it.
    """

    label: str
    number: int
    in_use: bool

    def take_part(self, step: int, bucket: int) -> None:
        """Submit a bucket for which this rank has nothing, as other ranks do theirs."""
        ...


class PlannedOperation:
    """One bucket, or the making of a plan.

    Args:
        begin: makes the schedule; called when the operation's turn has come.
    """

    __slots__ = ("begin", "handle", "place")

    def __init__(self, label: str, place: Place, begin: Callable[[], Schedule]) -> None:
        self.begin = begin
        self.place = place
        self.handle = Handle(label)


class PlannedLane:
    """One process set's planned operations on this rank.

    Args:
        fabric: the process set's means.
        transport: a message space of the lane's own.

    Attributes:
        joined: this rank has called ``join()``: it takes part in whatever bucket the others begin.
        submitted: operations of this rank's own; it tells who went on longest.
    """

    def __init__(self, fabric: Fabric, transport: Transport) -> None:
        self.fabric = fabric
        self.transport = transport
        self.joined = False
        self.submitted = 0
        self._tagging = Tagging(transport.max_tag)
        self._queue: deque[PlannedOperation] = deque()
        self._current: tuple[Running, PlannedOperation] | None = None
        self._begun = 0
        self._waiting_since = 0.0
        self._next_call_s = _CHECK_AFTER_S
        self._plans: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()
        self._dropped: dict[int, Plan] = {}
        self._made = 0
        self._broken: HorovodInternalError | None = None
        self._alarms: list[Token] = []

    def enter(self, plan: Plan) -> int:
        """Give a plan its number, the same on every rank since plans are made in one order."""
        self._made += 1
        self._plans[self._plan_bits(self._made)] = plan
        return self._made

    def keep(self, plan: Plan) -> None:
        """Hold a plan that nobody holds on this rank any more: once it has joined, it takes part in others' steps."""
        self._dropped[plan.number] = self._plans[self._plan_bits(plan.number)] = plan

    def in_use(self) -> list[int]:
        """The numbers of the plans that this rank may step."""
        return [plan.number for plan in list(self._plans.values()) if plan.in_use]

    def let_go(self, in_use: Container[int]) -> None:
        """Keep only plans that some rank may step."""
        for number in list(self._dropped):
            if number not in in_use:
                del self._dropped[number]

    def _plan_bits(self, number: int) -> int:
        """What messages call a plan."""
        return self._tagging.place(self._tagging.tag(Place(number, 0, 0))).plan

    def submit(self, operation: PlannedOperation) -> None:
        """Queue an operation, from any thread."""
        self.submitted += not self.joined
        timeline = self.fabric.instruments.timeline
        if timeline is not None:
            timeline.begin(operation.handle.name, "QUEUE")
        self._queue.append(operation)

    @property
    def idle(self) -> bool:
        return not (self._queue or self._current or self.joined)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global rank of each member."""
        return self.fabric.ranks

    def pending(self) -> list[Pending]:
        """The operation under way; for the watch, whose thread does not hold the engine's lock."""
        current, queued = self._current, list(self._queue)
        if current is None:
            return []
        operation = current[1]
        since = max(each.handle.waiting for each in [operation, *queued])
        return [Pending(operation.handle.name, "planned", since, True, operation.place.step == 0)]

    def progress(self) -> bool:
        """Do all that can be done without waiting. Returns True when anything moved."""
        moved = False
        while True:
            if self._current is None:
                if not self._queue and not (self.joined and self._follow()):
                    return moved
                self._begin(self._queue.popleft())
            elif not self._advance(*self._current):
                return moved
            moved = True

    def abandon(self, error: HorovodInternalError | None = None) -> None:
        """Fail everything that is queued or under way."""
        operations = [self._current[1], *self._queue] if self._current else list(self._queue)
        for operation in operations:
            operation.handle.fail(
                error or ShutDownError(f"{operation.handle.name} was still under way at shutdown()")
            )
        if self._current is not None:
            self._current[0].close()
        self._queue.clear()
        self._current = None

    def _begin(self, operation: PlannedOperation) -> None:
        if self._broken is not None:
            operation.handle.fail(self._broken)
            return
        timeline = self.fabric.instruments.timeline
        if timeline is not None:
            timeline.end(operation.handle.name)
            timeline.begin(operation.handle.name, "ALLREDUCE")
        try:
            schedule = operation.begin()
        except Exception as error:  # noqa: BLE001  (whoever waits for it gets it)
            operation.handle.fail_from(error)
            return
        self._current = Running(schedule, self.transport, self._tagging.tag(operation.place)), operation
        self._begun += 1
        self._waiting_since = 0.0
        self._next_call_s = _CHECK_AFTER_S

    def _advance(self, running: Running, operation: PlannedOperation) -> bool:
        try:
            moved = running.advance()
        except PeerLostError:
            raise
        except Exception as error:  # noqa: BLE001  (whoever waits for it gets it)
            operation.handle.fail_from(error)
            running.close()
            self._current = None
            return True
        if running.finished:
            timeline = self.fabric.instruments.timeline
            if timeline is not None:
                timeline.end(operation.handle.name)
            operation.handle.succeed(running.result)
            self._current = None
        elif moved:
            self._waiting_since = 0.0
        else:
            self._look_for_strangers(running, operation)
        return moved

    def _look_for_strangers(self, running: Running, operation: PlannedOperation) -> None:
        """After some waiting: has a rank whose message is due sent one of another place?"""
        now = time.monotonic()
        if not self._waiting_since:
            self._waiting_since = now
        if now - self._waiting_since < _CHECK_AFTER_S:
            return
        self._waiting_since = now
        text = self._read_alarm()
        if text is None:
            self._read_calls()
            message = self.transport.probe()
            tag = self._tagging.tag(operation.place)
            known = (tag, self._tagging.call, self._tagging.alarm)  # the last two may have arrived just now
            if message is None or message.tag in known or message.peer not in running.awaited:
                self._call(running, tag)
                return
            ranks = self.fabric.ranks
            text = (
                f"ranks are out of step: rank {ranks[self.transport.rank]} is at {self._describe(tag)}, "
                f"rank {ranks[message.peer]} at {self._describe(message.tag)}. Every rank must make the same "
                "optimizer steps in the same order; after this error gradients can't be exchanged until "
                "shutdown() and init()"
            )
            self._raise_alarm(text)
        self._broken = DisagreementError(text)
        self.abandon(self._broken)

    def _call(self, running: Running, tag: int) -> None:
        """Tell who keeps this rank waiting where it is: who has called join() may have nothing else to follow.

        Needed where a rank's part begins with a message of its own: the root of a broadcast, the odd rank of Adasum.
        """
        call = np.array([self._begun, tag], np.int64)
        for peer in running.awaited:
            self._alarms.append(self.transport.send(call, peer, self._tagging.call, whole=True))
        self._waiting_since += self._next_call_s  # rarely, if it takes long
        self._next_call_s = min(2 * self._next_call_s, 1.0)

    def _read_calls(self) -> int | None:
        """The tag of the operation that others wait for this rank to begin, None when there is none."""
        found = None
        call = np.empty(2, np.int64)
        while (message := self.transport.probe(self._tagging.call)) is not None:
            token = self.transport.recv(call, message.peer, message.tag, whole=True)
            while not self.transport.done((token,)):  # it has arrived
                pass
            if call[0] == self._begun + 1:  # every rank begins the same operations; others are over
                found = int(call[1])
        return found

    def _raise_alarm(self, text: str) -> None:
        """Tell everyone: a rank that waits for one of the two would never find out."""
        message = np.frombuffer(text.encode(), np.uint8)
        for peer in range(self.transport.size):
            if peer != self.transport.rank:
                self._alarms.append(self.transport.send(message, peer, self._tagging.alarm, whole=True))

    def _read_alarm(self) -> str | None:
        message = self.transport.probe(self._tagging.alarm)
        if message is None:
            return None
        buffer = np.empty(message.size_bytes, np.uint8)
        token = self.transport.recv(buffer, message.peer, message.tag, whole=True)
        while not self.transport.done((token,)):  # it has arrived
            pass
        return buffer.tobytes().decode()

    def _describe(self, tag: int) -> str:
        place = self._tagging.place(tag)
        if place.plan == 0:
            return "the making of a new plan (its parameters changed, or an optimizer was wrapped)"
        plan = self._plans.get(place.plan)
        label = f"plan {place.plan}" if plan is None else plan.label
        return f"{label}, step {place.step}, bucket {place.bucket}"

    def _follow(self) -> bool:
        """On a joined rank: take part in the bucket that others have begun, if there is one."""
        tag = self._read_calls()
        if tag is None:
            message = self.transport.probe()
            if message is None or message.tag == self._tagging.call:
                return False
            tag = message.tag
        place = self._tagging.place(tag)
        plan = self._plans.get(place.plan)
        if plan is None:
            text = (
                f"rank {self.fabric.ranks[self.transport.rank]} has called join(), but another rank is at "
                f"{self._describe(tag)}, which this rank can't follow"
            )
            self._raise_alarm(text)
            self.joined = False
            raise PeerLostError(text)
        plan.take_part(place.step, place.bucket)
        return bool(self._queue)
