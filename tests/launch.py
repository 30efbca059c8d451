"""Starting mpirun from a test, with a hard limit and nothing left behind.

``run_ranks`` is what fault tests and example tests call; ``MpiJob`` is the process control under it, which the runner
of tests/mpi uses too. Every process of a job carries a variable of random value, by which it is found in /proc even
when its parent has gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from horo_lite.cli import finding, launchers

ROOT = Path(__file__).parent.parent
SCALE = float(os.environ.get("HORO_LITE_TEST_TIMEOUT_SCALE", "1"))
"""Every time limit is multiplied by this; raise it on a slow or busy machine."""

_SITE = Path(__file__).parent / "site"
_JOB_VARIABLE = "HORO_LITE_TEST_JOB"
_SAID_VARIABLE = "HORO_LITE_TEST_SAID"
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TERM_GRACE_S = 5.0
_LEFT_S = 5.0
_POLL_S = 0.02


def _end_with_parent() -> None:
    """Ask the kernel to end mpirun when the pytest that started it is killed, which can't clean up itself."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def child_environment() -> dict[str, str]:
    """The environment of a Python that a test starts: it finds horo_lite, takes one core and is quiet."""
    path = [str(ROOT), str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(path)}


@functools.cache
def launcher() -> launchers.Launcher:
    """The launcher of the MPI that is installed beside this Python."""
    return finding.find_launcher()


class MpiJob:
    """One mpirun under way, its standard output and error in one file, each line tagged with its rank."""

    def __init__(self, command: Sequence[str], ranks: int, env: Mapping[str, str | None] | None = None) -> None:
        """Start ``command`` on ``ranks`` ranks; a variable of value None is removed from the environment."""
        self._mark = uuid.uuid4().hex
        self._file = tempfile.NamedTemporaryFile(prefix="horo-lite-test-", suffix=".log")  # noqa: SIM115
        job = launchers.Job(command, ranks, cores=len(os.sched_getaffinity(0)))
        environment = child_environment() | launcher().environment(job)
        for name, value in {**(env or {}), _JOB_VARIABLE: self._mark}.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        self.process = subprocess.Popen(
            launcher().command(job), env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=self._file,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_end_with_parent,
        )

    def poll(self) -> int | None:
        """mpirun's exit status, None while it runs."""
        return self.process.poll()

    def wait(self, limit_s: float) -> int | None:
        """The exit status, or None when the job still runs after ``limit_s`` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(limit_s)
        return None

    def output(self) -> str:
        """What all ranks have printed so far."""
        return Path(self._file.name).read_text(errors="replace")

    def survivors(self) -> list[int]:
        """Processes of this job that are alive, mpirun and its helpers among them."""
        mark = f"{_JOB_VARIABLE}={self._mark}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return sorted(found)

    def kill(self) -> None:
        """End everything: mpirun is asked first, since only it can clean up after itself."""
        if self.poll() is None:
            self.process.terminate()
            self.wait(_TERM_GRACE_S)
        if self.poll() is None:
            self.process.kill()
            self.wait(_TERM_GRACE_S)
        for pid in self.survivors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclasses.dataclass(frozen=True)
class Finished:
    """How a job ended."""

    returncode: int | None
    """mpirun's exit status; None when the limit was reached and the job was killed."""
    output: str
    seconds: float
    survivors: tuple[int, ...]
    """Processes found alive a moment after mpirun had ended (all killed by now)."""


def run_ranks(
    script: str | Path,
    ranks: int,
    *arguments: str,
    limit_s: float = 30.0,
    env: Mapping[str, str | None] | None = None,
    signals: Sequence[tuple[float, int]] = (),
    awaited: str | None = None,
) -> Finished:
    """Run a script on some ranks and wait for its end.

    Args:
        script: a file, or the text of a script (anything with a line break in it).
        limit_s: after so many seconds (scaled) everything is killed, and ``returncode`` is None.
        env: additional variables; None removes one.
        signals: pairs of (seconds after the start, signal number) to send to mpirun.
        awaited: a regular expression; once the job has printed it, the file of which ranks have the name in
            HORO_LITE_TEST_SAID exists. So a rank is late for exactly as long as it takes.
    """
    command = [sys.executable, *(["-c", script] if "\n" in str(script) else [str(script)]), *arguments]
    start = time.monotonic()
    said = Path(tempfile.gettempdir(), f"horo-lite-test-{uuid.uuid4().hex}")
    job = MpiJob([str(word) for word in command], ranks, {**(env or {}), _SAID_VARIABLE: str(said)})
    try:
        for after_s, number in signals:
            job.wait(start + after_s - time.monotonic())
            if job.poll() is None:
                job.process.send_signal(number)
        if awaited is not None:
            wait_until(lambda: job.poll() is not None or re.search(awaited, job.output()), start + limit_s * SCALE)
            said.touch()
        returncode = job.wait(start + limit_s * SCALE - time.monotonic())
        seconds = time.monotonic() - start
        if returncode is not None:  # mpirun may end a moment before the last of its helpers
            wait_until(lambda: not job.survivors(), time.monotonic() + _LEFT_S * SCALE)
        survivors = job.survivors() if returncode is not None else []
    finally:
        job.kill()
        said.unlink(missing_ok=True)
    return Finished(returncode, job.output(), seconds, tuple(survivors))


def wait_until(condition: Callable[[], object], until: float) -> None:
    """Return when a condition is true, or at a point of ``time.monotonic()``."""
    while time.monotonic() < until and not condition():
        time.sleep(_POLL_S)
