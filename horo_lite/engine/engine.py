"""Drives everything that is under way: whoever waits polls, and a thread does when nobody waits.

There is one lock. The thread that holds it calls ``progress``, which never blocks; a caller that waits takes the
polling over from the communication thread, so that a synchronous call needs no other thread at all, and two threads
never poll at once. With nothing under way the communication thread sleeps without polling.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from horo_lite.engine.handles import Handle, Pending
from horo_lite.engine.instruments import Instruments
from horo_lite.engine.short_way import ShortWay
from horo_lite.errors import OWN_FAULT, HorovodInternalError, PeerLostError, ShutDownError
from horo_lite.interfaces import Array
from horo_lite.transport.waiting import Backoff

if TYPE_CHECKING:
    from horo_lite.engine.named import NamedLane
    from horo_lite.engine.operations import Operation

_log = logging.getLogger("horo_lite")
_OTHER_WAITER_S = 1e-3
_DIRECT_POLLS = 300  # about 0.2 ms


class Lane(Protocol):
    """Something the engine drives: the named and the planned operations of one process set."""

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def joined(self) -> bool: ...

    @property
    def idle(self) -> bool: ...

    def pending(self) -> list[Pending]: ...

    def progress(self) -> bool: ...

    def abandon(self, error: HorovodInternalError | None = None) -> None: ...


class Engine:
    """The operations of this process.

    Args:
        spin_polls: how long a waiting caller polls before it offers its core to others (``waiting.Backoff``).
        threaded: start the communication thread; False where the caller does all polling (unit tests, an MPI that
            lets one thread in).

    Attributes:
        moves: grows whenever anything gets on.
    """

    def __init__(
        self, spin_polls: int = 100, threaded: bool = True, instruments: Instruments | None = None
    ) -> None:
        self.instruments = instruments or Instruments()
        self._lanes: list[Lane] = []
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._spin_polls = spin_polls
        self._direct_polls = _DIRECT_POLLS if spin_polls else 0
        self._closing = self._closed = False
        self.moves = 0
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._serve, name="horo_lite-engine", daemon=True)
            self._thread.start()

    @property
    def lanes(self) -> list[Lane]:
        """Those driven now."""
        return list(self._lanes)

    def add(self, lane: Lane) -> None:
        """Drive this lane from now on."""
        with self._lock:
            self._lanes.append(lane)

    def remove(self, lane: Lane) -> None:
        """Drive this lane no longer; what it still has under way fails."""
        with self._lock:
            self._lanes.remove(lane)
            lane.abandon()

    def wake(self) -> None:
        """Something was submitted that nobody waits for yet: the communication thread looks after it."""
        if not self._work.is_set():
            self._work.set()

    def poll(self, handle: Handle) -> bool:
        """True when the operation is finished; lets it go on if nobody else is at it."""
        if not handle.finished and self._lock.acquire(blocking=False):
            try:
                self._progress()
            finally:
                self._lock.release()
        return handle.finished

    def call(self, lane: NamedLane, operation: Operation, arguments: Hashable = None) -> Any:
        """A synchronous call: at once in the caller's thread where nothing else is under way; else like any other.

        Args:
            arguments: by which ``repeat`` knows the same call again; None where it should not.
        """
        taken = False
        if self._lock.acquire(blocking=False):
            try:
                taken = lane.short_way.call(operation, self._direct_polls, arguments)
            except PeerLostError as error:
                operation.handle.fail(error)
                lane.abandon(error)
            finally:
                self._lock.release()
        if not taken and not operation.handle.finished:
            lane.submit(operation)
        return self.wait(operation.handle)

    def repeat(
        self,
        lane: NamedLane,
        arguments: Hashable,
        name: str | None,
        values: Array,
        target: Array,
        make: Callable[[], Operation],
    ) -> Handle | bool:
        """A small all-reduce once more (``ShortWay.repeat``); False where it must be made and called."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return lane.short_way.repeat(arguments, name, values, target, make, self._direct_polls)
        except PeerLostError as error:
            lane.abandon(error)
            raise
        finally:
            self._lock.release()

    def wait(self, handle: Handle) -> Any:
        """Wait for an operation and return its result, or raise its error."""
        if not handle.finished:
            self.drive(lambda: handle.finished, handle)
        return handle.result()

    def drive(self, done: Callable[[], bool], handle: Handle | None = None) -> None:
        """Poll in the caller's thread until ``done()``; the heart of every synchronous call."""
        backoff = Backoff(self._spin_polls)
        if handle is not None:
            handle.waiting = time.monotonic()
        while not done():
            if self._closed:
                raise ShutDownError(
                    "an operation that this thread waits for was still under way at shutdown(): end threads before it"
                )
            if not self._lock.acquire(timeout=_OTHER_WAITER_S):
                if _interrupts_a_poll():
                    raise HorovodInternalError(
                        "a signal handler or a finalizer called a collective while its thread was waiting in another "
                        "one: let it set a flag, and look at that between two steps"
                    )
                continue
            try:
                self._poll_until(done, backoff)
            finally:
                self._lock.release()
        if not all(lane.idle for lane in self._lanes):
            self.wake()  # a message of ours may still be leaving, and others wait for it

    def _poll_until(self, done: Callable[[], bool], backoff: Backoff) -> None:
        while not (done() or self._closing):
            if self._progress():
                backoff.reset()
                continue
            backoff.pause()

    def forbid(self, reason: str) -> None:
        """In a forked child, which has the memory of a rank but none of its messages: whatever it asks for raises."""

        def refuse(*_: Any, **__: Any) -> Any:
            raise HorovodInternalError(reason)

        for entry in ("call", "repeat", "wait", "drive", "poll", "wake"):
            setattr(self, entry, refuse)

    def close(self) -> None:
        """End the communication thread; operations still under way fail."""
        self._closing = True
        self._work.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            for lane in self._lanes:
                lane.abandon()
            self._lanes.clear()
            self._closed = True

    def _progress(self) -> bool:
        """One round over the lanes, by the thread that holds the lock."""
        moved = False
        timeline = self.instruments.timeline
        if timeline is not None and timeline.mark_cycles:
            timeline.cycle()
        for lane in self._lanes:
            if lane.idle:
                continue
            try:
                if lane.progress():
                    moved = True
                    self.moves += 1
            except PeerLostError as error:
                lane.abandon(error)
            except Exception as error:  # noqa: BLE001  (a fault of ours: whoever waits gets it)
                fault = HorovodInternalError(f"the engine failed: {type(error).__name__}: {error}. {OWN_FAULT}")
                fault.__cause__ = error
                lane.abandon(fault)
        return moved

    def _serve(self) -> None:
        backoff = Backoff(spin_polls=0, yield_s=0.0)
        while not self._closing:
            if all(lane.idle for lane in self._lanes):
                self._work.clear()
                if all(lane.idle for lane in self._lanes) and not self._closing:
                    self._work.wait()
                backoff.reset()
                continue
            moved = False
            if self._lock.acquire(blocking=False):
                try:
                    moved = self._progress()
                finally:
                    self._lock.release()
            if moved:
                backoff.reset()
            else:
                backoff.pause()


_HOLD_THE_LOCK = {
    method.__code__ for method in (Engine._poll_until, Engine._progress, ShortWay.call, ShortWay.repeat)
}


def _interrupts_a_poll() -> bool:
    """This thread holds the lock already: handlers and finalizers run on the stack of what they interrupt."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code not in _HOLD_THE_LOCK:
        frame = frame.f_back
    return frame is not None
