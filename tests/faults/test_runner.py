"""The runner of tests/mpi survives tests that hang, fail on one rank, kill the job or break its start."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch import ROOT, SCALE

SAMPLES = ROOT / "tests" / "mpi" / "runner" / "samples"


def run_pytest(name: str, *where: str) -> str:
    """The output of a pytest that runs one file of samples, with a tenth of the usual limits."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *(where or [str(SAMPLES / name)])]
    env = {**os.environ, "HORO_LITE_TEST_TIMEOUT_SCALE": str(SCALE * 0.1)}
    for name in ("CI", "BUILD_NUMBER"):  # there pytest repeats whole failures in its summary
        env.pop(name, None)
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120 * SCALE).stdout


@pytest.fixture(scope="module")
def faults() -> str:
    return run_pytest("sample_numpy_faults.py")


def outcomes(output: str) -> dict[str, str]:
    return dict(re.findall(r"::(\w+\[[\w-]+\]) (PASSED|FAILED|SKIPPED)", output))


def failure(output: str, test: str) -> str:
    """The text under a test's heading."""
    return re.split(r"\n_{3,} .+ _{3,}\n|\n={3,} .+ ={3,}\n", output.split(f" {test} _", 1)[1], maxsplit=1)[0]


def test_each_test_is_judged_and_those_after_a_fault_run(faults):
    assert outcomes(faults) == {
        "test_before[np2]": "PASSED",
        "test_hangs_on_rank_1[np2]": "FAILED",
        "test_after_hang[np2]": "PASSED",
        "test_fails_on_rank_1_while_rank_0_waits[np2]": "FAILED",
        "test_after_failure[np2]": "PASSED",
        "test_kills_rank_1[np2]": "FAILED",
        "test_after_kill[np2]": "PASSED",
        "test_skips[np2]": "SKIPPED",
        "test_skips_on_rank_1[np2]": "FAILED",
        "test_with_parameter[np2-1]": "PASSED",
        "test_with_parameter[np2-2]": "PASSED",
        "test_at_the_end[np1]": "PASSED",
        "test_at_the_end[np3]": "PASSED",
    }


def test_a_hang_is_shown_with_the_stacks_of_its_ranks(faults):
    text = failure(faults, "test_hangs_on_rank_1[np2]")
    assert re.search(r"no end within [\d.]+ s on rank 1\n", text)
    assert "in test_hangs_on_rank_1" in text
    assert "/_pytest/" not in text


def test_a_failure_is_shown_with_its_rank_and_output(faults):
    text = failure(faults, "test_fails_on_rank_1_while_rank_0_waits[np2]")
    assert "[rank 0 of 2] did not end" in text
    assert "[rank 1 of 2] failed" in text
    assert "assert 1 == 0" in text
    assert "about to fail" in text.split("output of all ranks")[1]


def test_a_killed_job_is_shown_with_its_status(faults):
    assert re.search(r"the job ended with status \d+ in this test", failure(faults, "test_kills_rank_1[np2]"))


def test_a_job_that_cannot_start_fails_all_its_tests_at_once():
    output = run_pytest("sample_numpy_broken.py")
    assert outcomes(output) == {"test_one[np2]": "FAILED", "test_two[np2]": "FAILED"}
    assert output.count("the job for numpy on 2 ranks does not start") == 2
    assert "broken on purpose" in output


def test_identifiers_are_the_same_however_the_file_is_found():
    name = "sample_numpy_parameters.py"
    expected = {f"test_both[np2-{side}-{number}]": "PASSED" for side in ("left", "right") for number in (1, 2)}
    assert outcomes(run_pytest(name)) == expected
    assert outcomes(run_pytest(name, "-o", f"python_files={name}", "tests")) == expected


def test_a_job_that_ends_badly_fails_its_last_test():
    output = run_pytest("sample_numpy_end.py")
    assert outcomes(output) == {"test_leaves_something_behind[np2]": "FAILED"}
    assert "all tests passed, but the job ended with status 3" in output


def ranks_of(mark: str) -> list[str]:
    """Processes of ranks that carry a variable of this value."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environ = (entry / "environ").read_bytes()
            ours = f"HORO_LITE_TEST_MARK={mark}".encode() in environ and b"HORO_LITE_TEST_FOLDER=" in environ
            if ours and (entry / "comm").read_text().startswith("python"):
                found.append(entry.name)
    return found


def wait_for(condition: Callable[[], bool], limit_s: float) -> bool:
    """Whether a condition came true in time."""
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def test_a_job_ends_with_the_pytest_that_started_it(tmp_path):
    samples = str(SAMPLES / "sample_numpy_faults.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "hangs", samples]
    mark = f"runner-{tmp_path.name}-{os.getpid()}"
    env = {**os.environ, "HORO_LITE_TEST_MARK": mark}
    outer = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        assert wait_for(lambda: len(ranks_of(mark)) == 2, 60 * SCALE)
    finally:
        outer.kill()
        outer.wait()
    assert wait_for(lambda: not ranks_of(mark), 20 * SCALE)
