"""The compressor that docs/compression.md shows runs, and finds at every step what it has kept."""

from __future__ import annotations

import re

import pytest

from tests.launch import ROOT, run_ranks

pytest.importorskip("torch")

PAGE = (ROOT / "docs" / "compression.md").read_text(encoding="utf-8")
KEPT = """
for parameter, state in optimizer.state.items():
    assert state["compressor.steps"] == 3 and int(state["step"]) == 3, state
    assert state["residual"].numel() == parameter.numel()
"""


def test_a_method_of_ones_own():
    (code,) = re.findall(r"^```python\n(import.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    done = run_ranks(code + KEPT, 2, limit_s=90)
    assert done.returncode == 0, done.output
    assert done.output.count("WireStats(dense_bytes=") == 2
