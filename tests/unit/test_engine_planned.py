"""The planned lane: one order on all ranks, tags that tell ranks out of step, a joined rank that follows."""

from __future__ import annotations

import numpy as np
import pytest

from horo_lite.engine import desync
from horo_lite.engine.places import Place, Tagging
from horo_lite.engine.planned import PlannedOperation
from horo_lite.errors import DisagreementError, ShutDownError
from horo_lite.interfaces import Exchange, Recv, Schedule, Send, Wait
from tests.unit.worlds import Lanes


def ring(rank: int, size: int, value: float, log: list[float]) -> Schedule:
    """One message to the next rank, one from the one before."""
    incoming = np.empty(1)
    yield Exchange(np.array([value], float), (rank + 1) % size, incoming, (rank - 1) % size)
    log.append(float(incoming[0]))
    return float(incoming[0])


@pytest.mark.parametrize("max_tag", [2**15 - 1, 2**22 - 1, 2**28 - 1, 2**30])
def test_places_and_tags(max_tag):
    tagging = Tagging(max_tag)
    tags = {}
    for plan in (0, 1, 2, 5):
        for step in (0, 1, 3):
            for bucket in (0, 1, 7):
                place = Place(plan, step, bucket)
                tag = tagging.tag(place)
                assert 0 <= tag <= max_tag
                assert tagging.place(tag) == place
                assert tags.setdefault(tag, place) == place
    assert tagging.alarm not in tags
    assert 0 <= tagging.alarm <= max_tag
    far = tagging.tag(Place(12345, 10**6, 3))
    assert 0 <= far <= max_tag
    assert tagging.place(far).plan != 0, "plan 0 is the making of plans"
    assert tagging.tag(Place(0, 10**9, 0)) != tagging.alarm


@pytest.mark.parametrize("size", [1, 2, 3])
def test_operations_go_one_after_the_other(size):
    lanes = Lanes(size, seed=5)
    logs: list[list[float]] = [[] for _ in range(size)]
    handles = []
    for rank, lane in enumerate(lanes.planned):
        for bucket in range(20):
            operation = PlannedOperation(
                "p", Place(1, 0, bucket), lambda r=rank, b=bucket: ring(r, size, 100 * r + b, logs[r])
            )
            lane.submit(operation)
            handles.append(operation.handle)
    lanes.finish(*handles)
    for rank in range(size):
        assert logs[rank] == [100 * ((rank - 1) % size) + bucket for bucket in range(20)]
    assert all(lane.idle for lane in lanes.planned)


def out_of_step(first: Place, second: Place) -> list[object]:
    lanes = Lanes(2)
    handles = []
    for rank, place in enumerate((first, second)):
        operation = PlannedOperation("p", place, lambda r=rank: ring(r, 2, 1.0, []))
        lanes.planned[rank].submit(operation)
        handles.append(operation.handle)
    return [lanes, *lanes.finish(*handles)]


@pytest.mark.parametrize(
    ("first", "second"),
    [(Place(1, 3, 0), Place(1, 4, 0)), (Place(1, 3, 0), Place(2, 3, 0)), (Place(1, 3, 0), Place(1, 3, 1)),
     (Place(1, 3, 0), Place(0, 2, 0))],
    ids=["step", "plan", "bucket", "new plan"],
)  # fmt: skip
def test_ranks_out_of_step_raise_on_both_sides(monkeypatch, first, second):
    monkeypatch.setattr(desync, "_CHECK_AFTER_S", 0.0)
    lanes, *errors = out_of_step(first, second)
    for error in errors:
        assert isinstance(error, DisagreementError)
        assert "out of step" in str(error)
        assert f"step {first.step}, bucket {first.bucket}" in str(error)
    later = PlannedOperation("p", Place(1, 9, 0), lambda: ring(0, 2, 1.0, []))
    lanes.planned[0].submit(later)
    (error,) = lanes.finish(later.handle)
    assert isinstance(error, DisagreementError), "gradients can't be exchanged any more, and nothing hangs"


def test_a_rank_that_is_ahead_is_not_out_of_step(monkeypatch):
    """Rank 2 waits for 0 and 1. Rank 0 has done its part and begun the next bucket; rank 1 is slow."""
    monkeypatch.setattr(desync, "_CHECK_AFTER_S", 0.0)
    lanes = Lanes(3)

    def sends() -> Schedule:
        yield Wait(((yield Send(np.ones(1), 2)),))

    def receives() -> Schedule:
        first, second = np.empty(1), np.empty(1)
        yield Wait([(yield Recv(first, 0)), (yield Recv(second, 1))])
        return float(first[0] + second[0])

    handles = {}
    for rank in (0, 1, 2):
        for bucket in (0, 1):
            operation = PlannedOperation("p", Place(1, 0, bucket), receives if rank == 2 else sends)
            lanes.planned[rank].submit(operation)
            handles[rank, bucket] = operation.handle
    for _ in range(10):
        lanes.planned[0].progress()
        lanes.planned[2].progress()
    assert handles[0, 1].finished
    assert not handles[2, 0].finished
    assert lanes.finish(*handles.values())[-2:] == [2.0, 2.0]


def test_a_fault_in_one_operation_leaves_the_next_ones(monkeypatch):
    lanes = Lanes(1)

    def fails() -> Schedule:
        raise MemoryError("no room")
        yield

    bad, good = PlannedOperation("bad", Place(1, 0, 0), fails), PlannedOperation(
        "good", Place(1, 0, 1), lambda: ring(0, 1, 7.0, [])
    )
    lanes.planned[0].submit(bad)
    lanes.planned[0].submit(good)
    error, value = lanes.finish(bad.handle, good.handle)
    assert "no room" in str(error)
    assert value == 7.0


def test_shutdown_fails_what_is_under_way_and_queued():
    lanes = Lanes(2)
    operations = [PlannedOperation("p", Place(1, 0, b), lambda: ring(0, 2, 1.0, [])) for b in range(3)]
    for operation in operations:
        lanes.planned[0].submit(operation)
    lanes.planned[0].progress()
    lanes.planned[0].abandon()
    for operation in operations:
        with pytest.raises(ShutDownError, match="p was still under way"):
            operation.handle.result()
    assert lanes.planned[0].idle
