"""What this process is doing: the Python stacks of its threads, as text, or from C when Python is stuck."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

OWN_THREADS = "horo_lite-"
_PACKAGE = str(Path(__file__).parents[2])
_DEPTH = 10
_THREADS = 6
_DUMP_SIGNAL = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else None  # a number that no library is known to use


def python_stacks() -> str:
    """The main thread's stack, then those of other threads of the program, innermost call last."""
    frames = sys._current_frames()
    main = threading.main_thread()
    others = [t for t in threading.enumerate() if t is not main and not t.name.startswith(OWN_THREADS)]
    parts = []
    for thread in [main, *others][:_THREADS]:
        frame = frames.get(thread.ident or 0)
        if frame is not None:
            title = "" if thread is main else f"thread {thread.name}:\n"
            parts.append(title + python_stack(frame))
    return "".join(parts) or "(the interpreter is ending)\n"


def python_stack(frame: FrameType | None) -> str:
    """One stack, without the insides of a call of ours: how the engine waits tells nobody anything."""
    stack = traceback.extract_stack(frame)
    ours = (index for index, each in enumerate(stack) if each.filename.startswith(_PACKAGE))
    end = next(ours, len(stack)) + 1
    return "".join(traceback.format_list(stack[:end])[-_DEPTH:])


def allow_dumps() -> None:
    """Let ``request_dump`` of another rank print this one's stacks even when no Python code can run here."""
    if _DUMP_SIGNAL is not None:
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            faulthandler.register(_DUMP_SIGNAL, file=2, all_threads=True)


def request_dump(pid: int) -> None:
    """Make a rank of this node print its stacks to its own standard error."""
    if _DUMP_SIGNAL is not None:
        with contextlib.suppress(OSError):
            os.kill(pid, _DUMP_SIGNAL)
