"""The pytest plugin in each rank: runs the planned tests in order and writes an event before and after each."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.mpi.runner import plan

_STAY_S = 60.0
"""How long a rank whose test failed waits for its job to be killed."""

_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


class Inner:
    """Registered by conftest.py in a rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Asked of the launcher's variables: a test's first act may be to find out that MPI does not start.
        rank = next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)
        self._events = plan.events_file(folder, rank).open("a", buffering=1, encoding="utf-8")
        self._stacks = plan.stack_file(folder, rank).open("w")
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        self._reports: list[pytest.TestReport] = []
        self._write({"kind": "hello", "pid": os.getpid()})

    def _write(self, event: plan.Event) -> None:
        self._events.write(json.dumps(event) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """With no terminal plugin, nobody else says why a file could not be imported."""
        if report.failed:
            print(report.longreprtext, file=sys.stderr, flush=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep what is planned, in the plan's order: the same on all ranks."""
        found = {item.nodeid: item for item in items}
        wanted = plan.read_plan(self._folder)
        missing = [test for test in wanted if test not in found]
        if missing:
            raise pytest.UsageError(f"not collected in this rank: {missing[0]}")
        items[:] = [found[test] for test in wanted]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reports = []
        print(plan.heading(nodeid), flush=True)
        self._write({"kind": "start", "test": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        # Set-up, call and tear-down count as one; the first that did not pass speaks for all.
        told = next((report for report in self._reports if not report.passed), self._reports[-1])
        text = str(told.longrepr[2]) if isinstance(told.longrepr, tuple) else told.longreprtext
        seconds = sum(report.duration for report in self._reports)
        self._write({"kind": "end", "test": nodeid, "outcome": told.outcome, "text": text, "seconds": seconds})
        if told.failed:
            # The other ranks may be waiting for this one inside a collective: the job ends here, by the outer hand.
            sys.stdout.flush()
            sys.stderr.flush()
            time.sleep(_STAY_S)
            os._exit(1)
