"""The planned lane: buckets that all ranks reduce in one order, agreed once; nothing is negotiated per step.

Operations are carried out one after the other. Every message, fences included, carries (plan, step, bucket) in its
tag, so that ranks out of step are found out without a message more (``desync``).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Container

from horo_lite.engine.desync import DesyncCheck
from horo_lite.engine.fabric import Fabric
from horo_lite.engine.handles import Handle, Pending
from horo_lite.engine.places import Place, Plan, Tagging
from horo_lite.errors import DisagreementError, HorovodInternalError, PeerLostError, ShutDownError
from horo_lite.interfaces import Schedule
from horo_lite.transport.driver import Running


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
        fabric: the process set's means, over a message space of the lane's own.

    Attributes:
        joined: this rank has called ``join()``: it takes part in whatever bucket the others begin.
        submitted: operations of this rank's own; it tells who went on longest.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.transport = transport = fabric.transport
        self.joined = False
        self.submitted = 0
        self._tagging = Tagging(transport.max_tag)
        self._queue: deque[PlannedOperation] = deque()
        self._current: tuple[Running, PlannedOperation] | None = None
        self._plans: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()
        self._dropped: dict[int, Plan] = {}
        self._made = 0
        self._broken: HorovodInternalError | None = None
        self._desync = DesyncCheck(transport, fabric.ranks, self._tagging, self._plans)

    def enter(self, plan: Plan) -> int:
        """Give a plan its number, the same on every rank since plans are made in one order."""
        self._made += 1
        self._plans[self._tagging.plan_bits(self._made)] = plan
        return self._made

    def keep(self, plan: Plan) -> None:
        """Hold a plan that nobody holds on this rank any more: once it has joined, it takes part in others' steps."""
        self._dropped[plan.number] = self._plans[self._tagging.plan_bits(plan.number)] = plan

    def in_use(self) -> list[int]:
        """The numbers of the plans that this rank may step."""
        return [plan.number for plan in list(self._plans.values()) if plan.in_use]

    def let_go(self, in_use: Container[int]) -> None:
        """Keep only plans that some rank may step."""
        for number in list(self._dropped):
            if number not in in_use:
                del self._dropped[number]

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
                error
                or ShutDownError(
                    f"{operation.handle.name} was still under way at shutdown(): finish the step before it"
                )
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
        self._desync.begin()

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
            self._desync.moved()
        elif (text := self._desync.look(running, operation.place)) is not None:
            self._broken = DisagreementError(text)
            self.abandon(self._broken)
        return moved

    def _follow(self) -> bool:
        """On a joined rank: take part in the bucket that others have begun, if there is one."""
        tag = self._desync.awaited_tag()
        if tag is None:
            return False
        place = self._tagging.place(tag)
        plan = self._plans.get(place.plan)
        if plan is None:
            text = (
                f"rank {self.fabric.ranks[self.transport.rank]} has called join(), but another rank is at "
                f"{self._desync.describe(tag)}, which this rank can't follow"
            )
            self._desync.raise_alarm(text)
            self.joined = False
            raise PeerLostError(text)
        plan.take_part(place.step, place.bucket)
        return bool(self._queue)
