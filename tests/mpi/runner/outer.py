"""The pytest plugin that starts the jobs and turns what their ranks write into ordinary test reports.

A test passes when it passes on every rank. When it fails on one, hangs or kills the job, the job is ended and the next
test gets a new one: ranks that disagree on which test they are in can prove nothing more.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch import ROOT, SCALE, MpiJob
from tests.mpi.runner import plan

_POLL_S = 0.01
_OTHERS_S = 2.0
"""When one rank has failed, how long the others get to say how they fared."""
_STACKS_S = 1.0
_END_S = 30.0
"""How long a job may take to end after its last test."""
_OUTPUT_CHARACTERS = 20_000
"""The end of the ranks' output that a failure shows."""

_NOT_THE_TESTS = ("/_pytest/", "/pluggy/", "/pytest/__main__.py", "<frozen runpy>")
"""Frames that every stack ends with."""

_PLUGINS = [f"-pno:{name}" for name in ("terminal", "cacheprovider", "pytest_mpi")]
# Nothing is captured, so that what a killed rank has printed is in the job's output.
_PYTEST = [*_PLUGINS, "-o", "addopts=--import-mode=importlib", "-s", "--rootdir", str(ROOT)]


class Verdict(Exception):
    """Raised within a job when a test cannot pass: its argument is the text of the failure."""


class RunningJob:
    """One mpirun that carries out a list of tests, from its start to its end."""

    def __init__(self, group: plan.Group, items: Sequence[pytest.Item]) -> None:
        self._ranks = group.ranks
        self._start_limit_s = max(plan.front_end(item.path).start_s for item in items) * SCALE
        self._folder = Path(tempfile.mkdtemp(prefix="horo-lite-test-"))
        plan.write_plan(self._folder, [item.nodeid for item in items])
        files = dict.fromkeys(str(item.path) for item in items)
        self._read_bytes = [0] * group.ranks
        self._pids: dict[int, int] = {}
        self._started: dict[str, float] = {}
        self._ended: dict[str, dict[int, plan.Event]] = defaultdict(dict)
        self._began = time.monotonic()
        self._job = MpiJob(
            [sys.executable, "-m", "pytest", *_PYTEST, *files], group.ranks,
            env={plan.FOLDER_VARIABLE: str(self._folder)},
        )

    @property
    def reached_a_test(self) -> bool:
        """False when the job broke before any rank began to test: a new one would break as well."""
        return bool(self._started)

    def result(self, item: pytest.Item) -> dict[int, plan.Event]:
        """Wait for a test's end on all ranks; each rank's end event.

        Raises:
            Verdict: it failed somewhere, took too long, or the job ended.
        """
        asked = time.monotonic()
        ends = self._ended[item.nodeid]
        while True:
            ended = self._job.poll() is not None
            self._read_events()
            if any(event["outcome"] == "failed" for event in ends.values()):
                raise Verdict(self._failure(item))
            if len(ends) == self._ranks:
                return ends
            if ended:
                raise Verdict(self._with_output(f"the job ended with status {self._job.poll()} in this test", item))
            started = self._started.get(item.nodeid)
            limit_s = plan.limit_s(item) if started else self._start_limit_s
            # The clock runs from when the test before had ended everywhere, or from this one's start.
            if time.monotonic() - max(started or self._began, asked) > limit_s:
                raise Verdict(self._hang(item, limit_s))
            time.sleep(_POLL_S)

    def finish(self) -> None:
        """Wait for the job's end after its last test.

        Raises:
            Verdict: it did not end, or not with status 0.
        """
        status = self._job.wait(_END_S * SCALE)
        if status is None:
            raise Verdict(self._with_output("all tests passed, but the job did not end\n" + self._stacks()))
        if status != 0:
            raise Verdict(self._with_output(f"all tests passed, but the job ended with status {status}"))

    def close(self) -> None:
        """End the job, if it has not ended, and remove what it left."""
        self._job.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read_events(self) -> None:
        for rank in range(self._ranks):
            with contextlib.suppress(FileNotFoundError), plan.events_file(self._folder, rank).open("rb") as file:
                file.seek(self._read_bytes[rank])
                whole, newline, _ = file.read().rpartition(b"\n")
                self._read_bytes[rank] += len(whole) + len(newline)
                for line in whole.splitlines():
                    self._take(rank, json.loads(line))

    def _take(self, rank: int, event: plan.Event) -> None:
        if event["kind"] == "hello":
            self._pids[rank] = event["pid"]
        elif event["kind"] == "start":
            self._started.setdefault(event["test"], time.monotonic())
        else:
            self._ended[event["test"]][rank] = event

    def _failure(self, item: pytest.Item) -> str:
        ends = self._ended[item.nodeid]
        until = time.monotonic() + _OTHERS_S
        while len(ends) < self._ranks and time.monotonic() < until and self._job.poll() is None:
            time.sleep(_POLL_S)
            self._read_events()
        texts = []
        for rank in range(self._ranks):
            outcome = ends[rank]["outcome"] if rank in ends else "did not end"
            text = ends[rank]["text"] if outcome == "failed" else ""
            texts.append(f"[rank {rank} of {self._ranks}] {outcome}\n{text}".rstrip())
        return self._with_output("\n\n".join(texts), item)

    def _hang(self, item: pytest.Item, limit_s: float) -> str:
        waiting = sorted(set(range(self._ranks)) - set(self._ended[item.nodeid]))
        ranks = ", ".join(str(rank) for rank in waiting)
        return self._with_output(f"no end within {limit_s:g} s on rank {ranks}\n{self._stacks()}", item)

    def _stacks(self) -> str:
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(_STACKS_S)
        texts = []
        for rank in self._pids:
            lines = plan.stack_file(self._folder, rank).read_text(errors="replace").splitlines()
            stacks = "\n".join(line for line in lines if not any(part in line for part in _NOT_THE_TESTS))
            texts.append(f"[rank {rank} of {self._ranks}] stacks\n{stacks}")
        return "\n".join(texts)

    def _with_output(self, text: str, item: pytest.Item | None = None) -> str:
        output = self._job.output()
        if item is not None and item.nodeid in self._started:
            _, _, output = output.partition(plan.heading(item.nodeid))
        output = output[-_OUTPUT_CHARACTERS:].strip()
        return f"{text}\n\noutput of all ranks:\n{output}" if output else text


class Outer:
    """Registered by conftest.py in the pytest that a person started."""

    def __init__(self) -> None:
        self._running: RunningJob | None = None
        self._broken: dict[plan.Group, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Bring the tests of one job together; the others stay where they are, before them."""
        order = {key: number for number, key in enumerate(dict.fromkeys(map(_key, items)))}
        items.sort(key=lambda item: order[_key(item)] if _is_mpi(item) else -1)

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Report a test under tests/mpi from its job; leave the others to pytest."""
        if not _is_mpi(item):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        item.ihook.pytest_runtest_logreport(report=self._report(item, nextitem))
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_sessionfinish(self) -> None:
        """After an interrupt or -x a job may be under way."""
        self._close()

    def _report(self, item: pytest.Item, nextitem: pytest.Item | None) -> pytest.TestReport:
        key = plan.group(item)
        last = nextitem is None or not _is_mpi(nextitem) or plan.group(nextitem) != key
        start = time.monotonic()
        try:
            if key in self._broken:
                raise Verdict(self._broken[key])
            ends = self._job(item).result(item)
            if last:
                self._job(item).finish()
                self._close()
        except Verdict as verdict:
            text = str(verdict)
            if self._running is not None and not self._running.reached_a_test:
                text = f"the job for {key.job} on {key.ranks} ranks does not start\n{text}"
                self._broken[key] = text
            self._close()
            return _make_report(item, "failed", text, time.monotonic() - start)
        skipped = {rank: event["text"] for rank, event in ends.items() if event["outcome"] == "skipped"}
        seconds = max(event["seconds"] for event in ends.values())
        if not skipped:
            return _make_report(item, "passed", None, seconds)
        if len(skipped) == key.ranks:
            return _make_report(item, "skipped", skipped[0], seconds)
        return _make_report(item, "failed", f"skipped on some ranks only: {skipped}", seconds)

    def _job(self, item: pytest.Item) -> RunningJob:
        if self._running is None:
            items = [other for other in item.session.items if _is_mpi(other) and _key(other) == _key(item)]
            self._running = RunningJob(plan.group(item), items[items.index(item) :])
        return self._running

    def _close(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None


def _is_mpi(item: pytest.Item) -> bool:
    return "world" in getattr(getattr(item, "callspec", None), "params", {})


def _key(item: pytest.Item) -> plan.Group | None:
    return plan.group(item) if _is_mpi(item) else None


def _make_report(item: pytest.Item, outcome: str, text: str | None, seconds: float) -> pytest.TestReport:
    longrepr: object = text
    if outcome == "skipped":
        longrepr = (str(item.path), item.location[1] or 0, text)
    return pytest.TestReport(
        item.nodeid, item.location, dict.fromkeys(item.keywords, 1), outcome, longrepr, "call",  # type: ignore[arg-type]
        duration=seconds,
    )
