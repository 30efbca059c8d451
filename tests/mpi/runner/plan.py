"""What the two sides of the runner agree on."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.launch import SCALE

FOLDER_VARIABLE = "HORO_LITE_TEST_FOLDER"
"""Set for ranks: the folder with the plan, and where events go."""

DEFAULT_RANKS = (1, 2, 3, 4)


class FrontEnd(NamedTuple):
    """A module under test, and the job that its tests share."""

    module: str
    job: str
    limit_s: float
    """For one test."""
    start_s: float
    """For mpirun and the imports."""


FRONT_ENDS = {
    "numpy": FrontEnd("horo_lite", "numpy", 30, 60),
    "torch": FrontEnd("horo_lite.torch", "torch", 30, 120),
    "keras": FrontEnd("horo_lite.keras", "tensorflow", 90, 180),
    "tensorflow": FrontEnd("horo_lite.tensorflow", "tensorflow", 90, 180),
}


class Group(NamedTuple):
    """The tests that share one mpirun."""

    job: str
    ranks: int


def front_end(path: Path) -> FrontEnd:
    """The front end that a test file is for, by its name: test_torch_optimizer.py is for torch."""
    match = re.match(rf"(?:test|sample)_({'|'.join(FRONT_ENDS)})(?:_|\.)", path.name)
    if match is None:
        raise pytest.UsageError(f"{path.name}: a file here is named test_FRONTEND_topic.py, of {', '.join(FRONT_ENDS)}")
    return FRONT_ENDS[match.group(1)]


def group(item: pytest.Item) -> Group:
    """The job that a collected test belongs to."""
    return Group(front_end(item.path).job, item.callspec.params["world"])  # type: ignore[attr-defined]


def limit_s(item: pytest.Item) -> float:
    """How long a test may take."""
    mark = item.get_closest_marker("limit")
    return float(mark.args[0] if mark else front_end(item.path).limit_s) * SCALE


def inner_folder() -> Path | None:
    """The folder between the two sides, in a rank; None in the pytest that a person started."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) if folder else None


def write_plan(folder: Path, tests: list[str]) -> None:
    """Leave the tests, in order, for the ranks."""
    (folder / "plan.json").write_text(json.dumps(tests))


def read_plan(folder: Path) -> list[str]:
    """The tests that a rank runs, in order."""
    tests: list[str] = json.loads((folder / "plan.json").read_text())
    return tests


def events_file(folder: Path, rank: int) -> Path:
    """Where a rank writes what happened, a line of JSON each."""
    return folder / f"events-{rank}.jsonl"


def stack_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its Python stacks when it is sent SIGUSR1."""
    return folder / f"stacks-{rank}.txt"


def heading(test: str) -> str:
    """What a rank prints before a test, so that the output of one test can be cut out."""
    return f"=== {test} ==="


Event = dict[str, Any]
"""``{"kind": "hello", "pid": 1}``, ``{"kind": "start", "test": id}`` or ``{"kind": "end", "test": id, "outcome": ...,
"text": ..., "seconds": ...}``; the outcome is "passed", "failed" or "skipped"."""
