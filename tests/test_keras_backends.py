"""Keras' torch and jax backends: the Keras tests of tests/mpi once more, in jobs with KERAS_BACKEND set."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.launch import ROOT, SCALE, child_environment, run_ranks

pytest.importorskip("keras")

FILES = sorted((ROOT / "tests" / "mpi").glob("test_keras_*.py"))
# One of each kind: a compiled step and an eager one, both accumulations, scaled losses, callbacks, a saved model.
SOME = """
    test_fit_equals_one_process and adam or test_a_loop or test_two_passes_per_update or reduced_once_per_update
    or test_loss_scaling_skips or test_broadcast_makes or test_ranks_with_different_numbers
    or test_what_compression_left or test_fit_goes_on
"""


def passed_on(backend: str, tests: str, limit_s: float) -> int:
    """How many tests of an expression pass with a backend; the others skip."""
    pytest.importorskip(backend)
    command = [sys.executable, "-m", "pytest", "-q", "-k", " ".join(tests.split()), *map(str, FILES)]
    done = subprocess.run(
        command, env=child_environment() | {"KERAS_BACKEND": backend}, cwd=ROOT, capture_output=True, text=True,
        timeout=limit_s * SCALE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(re.search(r"(\d+) passed", done.stdout)[1])


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_some_of_everything(backend):
    assert passed_on(backend, f"np2 and ({SOME})", limit_s=240) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_everything(backend):
    """All at 2 ranks, and at 1 and 3 that training is that of one process."""
    assert passed_on(backend, "np2 or (np1 or np3) and equals_one_process", limit_s=900) >= 90


@pytest.mark.slow
def test_one_thread_of_xla_does_not_lock_up():
    pytest.importorskip("jax")
    script = ROOT / "tests" / "scripts" / "one_xla_thread.py"
    done = run_ranks(script, 2, limit_s=150, env={"KERAS_BACKEND": "jax", "HORO_LITE_BUCKET_BYTES": "65536"})
    assert done.returncode == 0, done.output
    assert len(re.findall("trained on cores 1", done.output)) == 2
