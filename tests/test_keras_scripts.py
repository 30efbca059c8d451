"""Whole scripts: those that people have written for Horovod, and one with a single executor thread."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.launch import ROOT, SCALE, child_environment, run_ranks

pytest.importorskip("tensorflow")

SCRIPTS = ROOT / "tests" / "scripts"


def run_as_horovod(name: str, *arguments: object) -> str:
    """What a script prints on two ranks under ``horo-lite run --horovod``."""
    command = [sys.executable, "-m", "horo_lite.cli", "run", "-np", "2", "--horovod", SCRIPTS / name, *arguments]
    # Unbuffered, Python writes the words of a line apart, and launchers mix them.
    env = {name: value for name, value in child_environment().items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [str(word) for word in command], env=env, capture_output=True, text=True, timeout=150 * SCALE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def printed(output: str, word: str) -> list[list[float]]:
    """The numbers that each rank printed after a word, which are to be the same."""
    lines = [re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", line) for line in re.findall(rf"\b{word} (.*)", output)]
    assert len(lines) == 2 and lines[0] == lines[1], output
    return [float(number) for number in lines[0]]


def test_a_script_for_horovod_tensorflow_keras(tmp_path):
    output = run_as_horovod("horovod_tensorflow_keras.py", tmp_path)
    losses = printed(output, "losses")
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert printed(output, "weights")
    assert "finished gradual learning rate warmup to 0.006" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-{epoch}.h5" for epoch in range(1, 7)]


@pytest.mark.slow
def test_a_script_for_horovod_keras_that_is_started_again(tmp_path):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    whole = run_as_horovod("horovod_keras.py", unbroken, 6)
    run_as_horovod("horovod_keras.py", broken, 3)
    rest = run_as_horovod("horovod_keras.py", broken, 6)
    assert printed(rest, "resumed") == [3.0, 24.0]
    assert printed(rest, "score") == pytest.approx(printed(whole, "score"), rel=1e-3)
    assert printed(rest, "weights") == pytest.approx(printed(whole, "weights"), rel=1e-3)


@pytest.mark.slow
def test_a_script_for_horovod_tensorflow(tmp_path):
    output = run_as_horovod("horovod_tensorflow.py", tmp_path)
    first, last = printed(output, "losses")
    assert last < first
    assert printed(output, "weights")
    assert (tmp_path / "checkpoint-1.index").exists()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_one_executor_thread_does_not_lock_up(ranks):
    done = run_ranks(SCRIPTS / "one_executor_thread.py", ranks, limit_s=150, env={"HORO_LITE_BUCKET_BYTES": "4096"})
    assert done.returncode == 0, done.output
    assert len(re.findall("threads 1", done.output)) == ranks
