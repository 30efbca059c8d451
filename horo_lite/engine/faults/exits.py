"""How a process leaves: ``sys.exit`` that nobody has caught, and the end of a forked child.

Python has no hook for ``SystemExit``, so ``sys.exit``, ``exit`` and ``quit`` raise one of our own.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from horo_lite.engine.faults.stacks import python_stack

exit_process = os._exit  # as Python made it

OnExit = Callable[[object, str], None]
"""Called with the status that a program has passed and its stack at that point, when nobody has caught it."""


def wrap_exits(on_exit: OnExit) -> None:
    """Let the ways to leave tell of it; as often as wanted, the last ``on_exit`` is told."""
    sys.exit = _wrapped(sys.exit, on_exit)  # type: ignore[assignment]
    for name in ("exit", "quit"):  # absent under python -S
        if hasattr(builtins, name):
            setattr(builtins, name, _wrapped(getattr(builtins, name), on_exit))


def exit_code(status: object) -> int:
    """What the system sees of it."""
    return (status if isinstance(status, int) else status is not None) & 0xFF


def _wrapped(leave: Callable[..., Any], on_exit: OnExit) -> Callable[..., Any]:
    def exit_(status: object = None) -> None:
        try:
            leave(status)
        except SystemExit as asked:
            raise _Exit(on_exit, asked.code, sys._getframe(1)) from None

    exit_.__doc__ = leave.__doc__
    return exit_


class _Exit(SystemExit):
    """What a wrapped ``sys.exit`` raises: it notices when nobody has caught it.

    ``finally`` blocks and ``except SystemExit`` work as ever. The interpreter itself reads ``code`` when the exception
    has left the last frame, and it is the only reader with no Python frame beneath it.
    """

    def __init__(self, on_exit: OnExit, status: object, caller: FrameType) -> None:
        super().__init__(*(() if status is None else (status,)))
        self._on_exit = on_exit
        self._status = status
        self._stack = python_stack(caller)

    @property
    def code(self) -> Any:
        try:
            sys._getframe(1)
        except ValueError:
            self._on_exit(self._status, self._stack)
        return self._status

    @code.setter
    def code(self, status: Any) -> None:
        self._status = status


class ForkedChild:
    """Ends a process that was forked from a rank: in its ordinary end mpi4py would finalise the MPI of the rank.

    Workers of ``multiprocessing`` do not end in that way; what ``os.fork()`` made does. A bare ``raise SystemExit(n)``
    can't be seen, and counts as 0.
    """

    def __init__(self) -> None:
        self._status = 0
        self._earlier = getattr(sys, "last_value", None)

    def install(self) -> None:
        """To be called in the child."""
        wrap_exits(self._on_exit)
        atexit.register(self._leave)  # the last one, and so the first to be called

    def _on_exit(self, status: object, stack: str) -> None:
        self._status = exit_code(status)

    def _leave(self) -> None:
        atexit.unregister(self._leave)
        atexit._run_exitfuncs()
        if getattr(sys, "last_value", None) is not self._earlier:  # the interpreter has shown it already
            self._status = 1
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, or None
                stream.flush()
        exit_process(self._status)
