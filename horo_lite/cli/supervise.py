"""Runs the launcher as a child: passes signals and the exit status on, and ends it when its time is up."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from horo_lite.engine.faults.parent import end_with_parent

TIMED_OUT = 124
"""The exit status after a time-out, as of coreutils' ``timeout``."""

_POLL_S = 0.1
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ESCALATION = ((1.0, signal.SIGTERM), (6.0, signal.SIGKILL))
"""Seconds after a request to stop, and what is sent then. The first second is for a Ctrl-C that the terminal has
already sent to the whole group: a launcher that is told twice gives up on cleaning up."""


class _Child:
    """The launcher under way, and how far its ending has got."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stop_asked: float | None = None
        self._pending = list(_ESCALATION)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """To be called once signals come here: one that comes before the child is there ends it a second later."""
        self._process = subprocess.Popen(command, env=environment, preexec_fn=end_with_parent)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on; a Ctrl-C has reached the child by itself."""
        if number != signal.SIGINT and self._process is not None:
            self._process.send_signal(number)
        self.stop()

    def stop(self) -> None:
        """Begin to end the child."""
        if self._stop_asked is None:
            self._stop_asked = time.monotonic()

    def wait(self, seconds: float) -> int | None:
        """The exit status, or None when the child still runs after some seconds."""
        if self._process is None:
            return None
        if self._stop_asked is not None:
            while self._pending and time.monotonic() - self._stop_asked >= self._pending[0][0]:
                self._process.send_signal(self._pending.pop(0)[1])
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


def supervise(command: Sequence[str], environment: Mapping[str, str], timeout_s: float | None = None) -> int:
    """Run a command to its end.

    Returns:
        Its exit status; 128 + n when signal n ended it; ``TIMED_OUT`` when it was ended after ``timeout_s`` seconds.
    """
    started = time.monotonic()
    timed_out = False
    child = _Child()
    before = {number: signal.signal(number, child.on_signal) for number in _FORWARDED}
    try:
        child.start(command, environment)
        while (status := child.wait(_POLL_S)) is None:
            if timeout_s is not None and not timed_out and time.monotonic() - started >= timeout_s:
                timed_out = True
                child.stop()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if timed_out:
        return TIMED_OUT
    return status if status >= 0 else 128 - status
