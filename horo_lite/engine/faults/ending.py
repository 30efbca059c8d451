"""A failure on this rank ends the whole job, with its traceback last and tagged with the rank.

Without this an uncaught exception leaves the other ranks waiting for ever in every MPI: the failing rank blocks in
``MPI_Finalize`` until they come there too. Installed by the first ``init()`` with more than one rank, and for the
life of the process: after ``shutdown()`` MPI still waits for all ranks at the end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn, Protocol

from horo_lite.engine.faults.exits import exit_code, exit_process, wrap_exits
from horo_lite.engine.faults.stacks import python_stack
from horo_lite.log import write_tagged

_FORWARD_S = 0.1  # launchers drop what a rank has printed but they have not read yet when a job is aborted
_ABORT_S = 5.0  # MPI_Abort itself may hang on a network that is cut
_ANNOUNCED_S = 0.5  # launchers end the other ranks by SIGTERM when one fails; its announcement is there first


class Job(Protocol):
    """What is ended (``transport.mpi_world.MPIWorld``)."""

    @property
    def finalized(self) -> bool:
        """MPI has been finalised: an ordinary failure of this process ends the job, and MPI can't be called."""
        ...

    def abort(self, code: int) -> None:
        """End all processes of the job."""
        ...

    def finalize(self) -> None:
        """Finalise MPI in its own time, once all ranks do."""
        ...


class Ending:
    """Ends the job in place of this process alone.

    Args:
        rank: for the tag of every line.

    Attributes:
        announce: lets the other ranks know that this one ends the job.
        awaited: other ranks count on this one, between ``init()`` and ``shutdown()``.
        other_failed: set when another rank has done so.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self.rank = rank
        self.announce: Callable[[], None] = lambda: None
        self.awaited = True
        self.other_failed = threading.Event()
        self._earlier = getattr(sys, "last_value", None)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._excepthook = sys.excepthook
        self._thread_hook = threading.excepthook

    def install(self) -> None:
        """Take over the hooks through which Python reports that nobody has caught something."""
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        wrap_exits(self.leave)
        os._exit = self._exit_at_once
        os.execv, os.execve = self._refused(os.execv), self._refused(os.execve)
        # A handler of the user's stays: it may save a checkpoint. SIGINT raises KeyboardInterrupt, seen by the hook.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_terminate)

    @property
    def in_charge(self) -> bool:
        """False in a forked child, and once MPI is finalised: then this process fails as any other does."""
        return os.getpid() == self._pid and not self.job.finalized

    def fail(self, text: str, code: int) -> None:
        """Print why, tagged, and end the job; does not return."""
        if not self._lock.acquire(blocking=False):  # another thread is at it
            time.sleep(2 * _ABORT_S)
        with contextlib.suppress(RuntimeError):  # no new thread once the interpreter is ending
            threading.Thread(target=_exit_later, args=(code,), daemon=True).start()
        try:
            write_tagged(self.rank, text)
            with contextlib.suppress(Exception):  # a courtesy; the channel may be what is broken
                self.announce()
            time.sleep(_FORWARD_S)
        finally:
            self.job.abort(code)
            exit_process(code)

    def leave_failed(self) -> None:
        """The program has come to its end: by an exception, where a hook was set over ours and has not called it."""
        error = getattr(sys, "last_value", None)  # the interpreter keeps what it hands to the hook
        if self.in_charge and error is not None and error is not self._earlier and not hasattr(sys, "ps1"):
            self.fail("".join(traceback.format_exception(type(error), error, sys.last_traceback)), 1)

    def leave_orphaned(self) -> None:
        """The launcher is gone, and MPI with it."""
        write_tagged(self.rank, "the process that started this rank has ended, so the rank ends too")
        exit_process(1)

    # --- what Python calls ---------------------------------------------------------------------------------------

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not self.in_charge or self._excepthook is not sys.__excepthook__:
            self._excepthook(kind, error, trace)
        if self.in_charge:
            code = 128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1
            self.fail("".join(traceback.format_exception(kind, error, trace)), code)

    def _on_thread_exception(self, args: Any) -> None:
        if issubclass(args.exc_type, SystemExit):  # it ends the thread, and nothing else
            return
        if not self.in_charge:
            self._thread_hook(args)
            return
        if self._thread_hook is not threading.__excepthook__:
            self._thread_hook(args)
        name = args.thread.name if args.thread is not None else "?"
        lines = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        self.fail(f"in thread {name}:\n" + "".join(lines), 1)

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        if not self.in_charge:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.other_failed.wait(_ANNOUNCED_S):  # its traceback shall be the last
            exit_process(128 + number)
        name = signal.Signals(number).name
        self.fail(f"ended by {name}, while at (innermost call last):\n{python_stack(frame)}", 128 + number)

    def _exit_at_once(self, status: int) -> NoReturn:
        """In place of ``os._exit``, after which MPICH's launcher kills the other ranks and reports success."""
        if self.in_charge:
            code = status & 0xFF
            if code or self.awaited:
                stack = python_stack(sys._getframe(1))
                self.fail(f"left by os._exit({status}), at (innermost call last):\n{stack}", code or 1)
            self.job.finalize()
        exit_process(status)

    def _refused(self, execute: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        """In place of ``os.execv`` and what is made of it: another program would be no rank, and end as if it were."""

        def instead(path: Any, *arguments: Any, **named: Any) -> NoReturn:
            if self.in_charge and self.awaited and os.access(path, os.X_OK):
                stack = python_stack(sys._getframe(1))
                self.fail(f"left for another program, {os.fsdecode(path)}, at (innermost call last):\n{stack}", 1)
            execute(path, *arguments, **named)

        return instead

    def leave(self, status: object, stack: str) -> None:
        """Nobody has caught a ``sys.exit``: a status that tells of a failure ends the job."""
        code = exit_code(status)
        if not code or not self.in_charge:
            return
        reason = "" if isinstance(status, int) else f"{status}\n"
        self.fail(f"{reason}left with exit status {code}, at (innermost call last):\n{stack}", code)


def _exit_later(code: int) -> None:
    time.sleep(_ABORT_S)
    exit_process(code)


_ending: Ending | None = None


def install(job: Job, rank: int) -> Ending:
    """The one ``Ending`` of this process; a second ``init()`` renews the rank."""
    global _ending
    if _ending is None or not _ending.in_charge:
        _ending = Ending(job, rank)
        _ending.install()
    _ending.job, _ending.rank, _ending.awaited = job, rank, True
    return _ending
