"""The trace goes on as long as it can be written, and training longer."""

from __future__ import annotations

import json
import logging

import pytest

from horo_lite.engine.timeline import Timeline
from horo_lite.errors import ArgumentError


def test_a_tensor_has_a_row_with_its_phases(tmp_path):
    path = tmp_path / "trace.json"
    timeline = Timeline(str(path))
    timeline.begin("weight", "NEGOTIATE_ALLREDUCE")
    timeline.end("weight")
    timeline.close()
    timeline.begin("weight", "dropped")
    events = json.loads(path.read_text())
    row = next(event["pid"] for event in events if event.get("args", {}).get("name") == "weight")
    assert [(event["ph"], event["pid"]) for event in events if "ts" in event] == [("B", row), ("E", row)]


def test_a_full_disk_ends_the_trace_with_one_warning(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("horo_lite"), "propagate", True)  # a world that was there has set it
    timeline = Timeline("/dev/full")
    for _ in range(1000):
        timeline.begin("weight", "ALLREDUCE")
        timeline.end("weight")
    timeline.close()
    assert caplog.text.count("the timeline ends here") == 1


def test_a_folder_that_is_not_there_is_said_at_once():
    with pytest.raises(ArgumentError, match="timeline can't be written"):
        Timeline("/nowhere/trace.json")
