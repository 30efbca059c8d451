"""Jobs that go wrong on purpose: what their scripts begin with, and what is true of every bad end."""

from __future__ import annotations

import importlib.util
import re
import textwrap

import pytest

from tests.launch import Finished, run_ranks

PREAMBLE = """
import os, signal, subprocess, sys, threading, time
import numpy as np
import horo_lite as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()

def reduce(name):
    return hvd.allreduce(np.ones(4, np.float32), op=hvd.Sum, name=name)

def until_said():  # be late until the test has seen what it awaits
    while not os.path.exists(os.environ["HORO_LITE_TEST_SAID"]):
        time.sleep(0.02)

reduce("warm-up")
"""

LAUNCHER_GOES_ON = """
import os, time
if os.fork():  # what the launcher sees: a process that lives, and keeps its connection open
    os.wait()
    time.sleep(60)
"""

STALL = {"HORO_LITE_STALL_WARN_S": "1", "HORO_LITE_STALL_ABORT_S": "3"}


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skip where one is not installed; without an import, which takes seconds for a framework."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def job(
    body: str, ranks: int = 2, limit_s: float = 25.0, preamble: str = PREAMBLE, arguments: tuple[str, ...] = (),
    **options: object,
) -> Finished:
    """Run a script on some ranks: the preamble, then ``body``."""
    return run_ranks(preamble + textwrap.dedent(body), ranks, *arguments, limit_s=limit_s, **options)


def tagged(done: Finished) -> list[str]:
    """The lines that ranks have tagged themselves, without the launcher's own tags."""
    return [found.group(0) for found in re.finditer(r"\[rank \d+\].*", done.output)]


def assert_bad_end(done: Finished, *says: str) -> None:
    """It ended by itself, with an error, with these texts (regular expressions), and left no process."""
    assert done.returncode is not None, f"the job went on until its limit:\n{done.output}"
    assert done.returncode != 0, done.output
    assert_says(done, *says)
    assert not done.survivors, done.survivors


def assert_good_end(done: Finished, *says: str) -> None:
    assert done.returncode == 0, done.output
    assert_says(done, *says)
    assert not done.survivors, done.survivors


def assert_says(done: Finished, *says: str) -> None:
    for text in says:
        assert re.search(text, done.output), f"{text!r} is not in:\n{done.output}"
