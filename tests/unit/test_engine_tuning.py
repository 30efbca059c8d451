"""The choice of algorithms on one node: by what was tried out, with what is settled beforehand."""

from __future__ import annotations

import numpy as np
import pytest

from horo_lite.collectives.selection import Row, Table
from horo_lite.config import Config
from horo_lite.engine import fabric, trial
from horo_lite.engine.operations import AllReduce
from horo_lite.engine.trial import preferred
from horo_lite.engine.tuning import describe
from horo_lite.interfaces import Reduction
from tests.unit.worlds import Lanes

LARGE = 600_000  # 4.8 MB: more than is laid out


def test_shared_memory_is_preferred_unless_another_is_clearly_faster():
    assert preferred({"ring": 0.7, "shared": 1.0}) == "shared"
    assert preferred({"ring": 0.6, "shared": 1.0}) == "ring"
    assert preferred({"ring": 1.0, "pairwise": 0.99}) == "pairwise"


@pytest.mark.parametrize(("budget_s", "files"), [(100.0, 1), (-1.0, 0)], ids=["time enough", "no time"])
@pytest.mark.parametrize("shared", [True, False])
def test_only_a_complete_measurement_is_kept(shared, budget_s, files, monkeypatch, tmp_path):
    monkeypatch.setattr(fabric, "is_crowded", lambda ranks: False)
    monkeypatch.setattr(trial, "_BUDGET_S", budget_s)
    lanes = Lanes(2, config=Config(cache_folder=str(tmp_path), shared_memory=shared))
    results = lanes.finish(*lanes.ask(lambda rank: AllReduce([np.full(LARGE, rank + 1.0)], "x", Reduction.SUM)))
    assert all((result == 3).all() for result in results)
    assert len(list(tmp_path.glob("selection-*.json"))) == files
    rows = lanes.named[0]._fabric.table.rows
    assert {row.wide for row in rows} == {True, False}
    assert all(row.limits[-1][0] > 1 << 30 for row in rows)
    assert lanes.named[0]._fabric.table == lanes.named[1]._fabric.table


def test_the_description_names_what_is_settled_first(monkeypatch):
    monkeypatch.setattr(fabric, "is_crowded", lambda ranks: False)
    table = Table((Row("allreduce", 2, 2, False, ((1 << 19, "ring"), (1 << 40, "shared"))),))
    on_one_node = describe(table, Lanes(2, config=Config()).named[0]._fabric)
    assert on_one_node.endswith("gathered up to 32 KiB, then shared")
    table = Table((Row("allreduce", 2, 2, False, ((1 << 19, "ring"), (1 << 40, "pairwise"))),))
    without = describe(table, Lanes(2, config=Config(shared_memory=False)).named[0]._fabric)
    assert without.endswith("gathered up to 32 KiB, ring up to 512 KiB, then pairwise")
