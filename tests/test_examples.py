"""Every example runs alone and on 1, 2 and 4 ranks, and its numbers are those of one process on the joined batch."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys

import pytest

from tests.launch import ROOT, SCALE, child_environment, run_ranks

EXAMPLES = ROOT / "examples"
NEEDS = {
    "numpy_statistics": "numpy",
    "torch_digits": "torch",
    "char_transformer": "torch",
    "keras_digits": "keras",
    "tensorflow_loop": "tensorflow",
}
# Sums in another order differ in the last bit, and training enlarges that.
RELATIVE = 2e-3
MOST_CHANGED_LINES = 14
LIMIT_S = 120.0


@pytest.fixture(params=NEEDS)
def example(request) -> str:
    for module in {NEEDS[request.param], "numpy" if "numpy" in request.param else "sklearn"}:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    part = {"torch": "torch/optimizer.py", "numpy": ""}.get(NEEDS[request.param], NEEDS[request.param])
    if not (ROOT / "horo_lite" / part).exists():
        pytest.skip(f"horo_lite/{part} is not there yet")
    return request.param


def numbers(output: str) -> list[float]:
    """The numbers of the last line that holds any."""
    lines = [line for line in output.splitlines() if re.search(r"\d\.\d", line)]
    return [float(number) for number in re.findall(r"-?\d+\.\d+", lines[-1])]


@functools.cache
def alone(script: str) -> list[float]:
    """What a script ends with that plain python runs."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script)], env=child_environment(), capture_output=True, text=True,
        timeout=LIMIT_S * SCALE,
    )
    assert done.returncode == 0, done.stderr
    return numbers(done.stdout)


def test_the_twin_differs_by_a_few_lines(example):
    before, after = ((EXAMPLES / f"{example}{end}.py").read_text().splitlines() for end in ("", "_distributed"))
    assert len([line for line in after if line not in before]) <= MOST_CHANGED_LINES


def test_alone_with_plain_python(example):
    assert alone(f"{example}_distributed.py") == pytest.approx(alone(f"{example}.py"), rel=RELATIVE, abs=RELATIVE)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_on_ranks(example, ranks):
    done = run_ranks(EXAMPLES / f"{example}_distributed.py", ranks, limit_s=LIMIT_S)
    assert done.returncode == 0, done.output
    assert numbers(done.output) == pytest.approx(alone(f"{example}.py"), rel=RELATIVE, abs=RELATIVE)


def test_a_model_cut_over_ranks():
    pytest.importorskip("torch")
    expected = alone("torch_pipeline.py")
    for ranks in (2, 4):
        done = run_ranks(EXAMPLES / "torch_pipeline.py", ranks, limit_s=LIMIT_S)
        assert done.returncode == 0, done.output
        assert numbers(done.output) == pytest.approx(expected, rel=RELATIVE)
