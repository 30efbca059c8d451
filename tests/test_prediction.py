"""What the simulator says of a network holds on a real one (if made of namespaces)."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest

from tests.launch import ROOT, SCALE, child_environment

LIMIT_S = 120.0


@pytest.mark.netns
@pytest.mark.slow
def test_predicted_times_are_those_of_four_hosts(tmp_path):
    script = ROOT / "benchmarks" / "prediction.py"
    done = subprocess.run(
        [sys.executable, str(script), "--sizes", "1MiB", "--limit-s", str(LIMIT_S / 3), "--output", str(tmp_path)],
        env=child_environment(), capture_output=True, text=True, timeout=LIMIT_S * SCALE, check=False,
    )
    if done.stdout.startswith("skipped: "):
        pytest.skip(done.stdout.removeprefix("skipped: ").strip())
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "prediction.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["per_host"], row["algorithm"]) for row in rows] == [
        ("1", "ring"), ("1", "hierarchical"), ("2", "ring"), ("2", "hierarchical"),
    ]
    assert all(0.75 <= float(row["ratio"]) <= 1.25 for row in rows)
