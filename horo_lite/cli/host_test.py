"""Can every two hosts talk? Each host starts a process by itself, then each pair runs the self-test on two ranks.

Pairs that have no host in common run at the same time, as in a tournament: n hosts take n rounds at most, and a round
takes as long as its slowest pair, at most ``limit_s`` and the time that a launcher takes to give up.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from horo_lite.cli import launchers, run, selftest
from horo_lite.cli.hosts import Host

_TERMINATE_S = 5.0  # for the launcher to clean up on the hosts that it reaches
_AT_A_TIME = 16


class Outcome(NamedTuple):
    """What came of one job.

    Attributes:
        fault: why it failed, "" when it came through.
        result: what the self-test said; empty for a job that only had to start.
    """

    hosts: tuple[str, ...]
    fault: str
    result: Mapping[str, Any]


class HostTest:
    """The jobs of one test.

    Args:
        template: says how to start a job, but for its command, ranks and hosts.
        limit_s: for each job.
    """

    def __init__(self, launcher: launchers.Launcher, template: launchers.Job, limit_s: float) -> None:
        self._launcher = launcher
        self._template = template
        self._limit_s = limit_s

    def run(self, hosts: Sequence[str]) -> Iterator[Outcome]:
        """Try each host, then each pair of those that started a process."""
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            reached = []
            for outcome in pool.map(self._alone, hosts):
                if not outcome.fault:
                    reached.append(outcome.hosts[0])
                yield outcome
            for pairs in rounds(reached):
                yield from pool.map(self._pair, pairs)

    def _alone(self, host: str) -> Outcome:
        status, output = self._start((host,), [sys.executable, "-c", "pass"])
        if status == 0:
            return Outcome((host,), "", {})
        return Outcome((host,), self._why(status, output, "could not start a process there"), {})

    def _pair(self, pair: tuple[str, str]) -> Outcome:
        status, output = self._start(pair, [sys.executable, "-m", selftest.__name__])
        result = selftest.result(output)
        if status == 0 and result is not None and result["size"] == 2:
            return Outcome(pair, "", result)
        return Outcome(pair, self._why(status, output, "they can't talk to one another"), {})

    def _why(self, status: int | None, output: str, meaning: str) -> str:
        if status is None:
            return f"{meaning}: no end within {self._limit_s:g} s"
        return f"{meaning} (exit status {status}): {selftest.cause(output)}"

    def _start(self, hosts: Sequence[str], command: Sequence[str]) -> tuple[int | None, str]:
        """Run a command on one rank a host. Returns its exit status, None when its time was up, and what it printed."""
        job = dataclasses.replace(
            self._template, command=command, ranks=len(hosts), hosts=[Host(name) for name in hosts]
        )
        environment = run.child_environment(self._launcher, job, horovod=False)
        job = dataclasses.replace(job, forwarded=run.forwarded(environment))
        with subprocess.Popen(
            self._launcher.command(job), env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        ) as process:
            try:
                return _in_time(process, self._limit_s)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def _in_time(process: subprocess.Popen[str], limit_s: float) -> tuple[int | None, str]:
    try:
        output, _ = process.communicate(timeout=limit_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        return None, process.communicate(timeout=_TERMINATE_S)[0]
    except subprocess.TimeoutExpired:
        return None, ""


def rounds(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Every pair once, in rounds in which each host has at most one partner (the circle method of tournaments)."""
    places: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        facing = zip(places[: len(places) // 2], reversed(places), strict=False)
        found.append([(one, other) for one, other in facing if one is not None and other is not None])
        places[1:] = [places[-1], *places[1:-1]]
    return found
