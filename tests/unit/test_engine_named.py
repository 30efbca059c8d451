"""The named lane on several ranks in one thread: any order, delayed messages, joins, faults, what is remembered."""

from __future__ import annotations

import dataclasses
import gc
import random
import threading

import numpy as np
import pytest

from horo_lite.config import Config
from horo_lite.engine import Handle, NamedLane, fabric, response_cache, sharing
from horo_lite.engine.control import NUMBERED
from horo_lite.engine.in_flight import InFlight
from horo_lite.engine.operations import AllGather, AllReduce, Broadcast, Join, Refusal
from horo_lite.errors import DisagreementError, HorovodInternalError, PeerLostError, ShutDownError
from horo_lite.interfaces import Array, Reduction
from horo_lite.transport.shared import NoRoomError
from tests.unit.worlds import Lanes


def reduce(value: float, name: str = "x", elements: int = 3) -> AllReduce:
    return AllReduce([np.full(elements, float(value))], name, Reduction.SUM)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_any_order_with_messages_delayed_at_random(size, seed):
    lanes = Lanes(size, seed=seed)
    order = random.Random(seed)
    for _ in range(3):
        handles = {}
        for rank in range(size):
            names = [f"op.{k}" for k in range(8)]
            order.shuffle(names)
            for name in names:
                handles[rank, name] = lanes.ask(lambda r, name=name: reduce(r + 1, name), [rank])[0]
            lanes.poll(order.randrange(3))
        for result in lanes.finish(*handles.values()):
            assert result.tolist() == [size * (size + 1) / 2] * 3
    assert all(lane.idle for lane in lanes.named)


@pytest.fixture
def uncrowded(monkeypatch):
    """As many cores as ranks, so that the short way may wait for the others."""
    monkeypatch.setattr(fabric, "is_crowded", lambda ranks: False)


def call(lane: NamedLane, value: float, elements: int, polls: int, in_place: bool, arguments: object) -> Handle | Array:
    """An all-reduce as the public functions do it: by what is kept of an earlier one, else the short way, else none."""
    values = np.full(elements, float(value))
    target = values if in_place else np.empty(elements)

    def make() -> AllReduce:
        return AllReduce([values], "x", Reduction.SUM, in_place=in_place, outputs=None if in_place else [target])

    again = lane.short_way.repeat(arguments, "x", values, target, make, polls)
    if again is True:
        return target
    if again:
        return again
    operation = make()
    if not lane.short_way.call(operation, polls, arguments):
        lane.submit(operation)
    return operation.handle


@pytest.mark.usefixtures("uncrowded")
@pytest.mark.parametrize("elements", [3, 20_000], ids=["travelling", "laid out"])
@pytest.mark.parametrize("polls", [0, 1, 3, 50])
@pytest.mark.parametrize("size", [1, 3])
def test_the_short_way_of_a_synchronous_call_and_the_ordinary_one_mix(size, polls, elements):
    """Each rank goes the short way as far as ``polls`` polls bring it, while the others have not asked yet."""
    lanes = Lanes(size, config=Config(cache_folder=""))
    lanes.finish(*lanes.ask(lambda rank: reduce(rank, elements=elements)))
    total = size * (size - 1) / 2
    for step in range(6):
        outcomes = [None] * size
        for rank in random.Random(step).sample(range(size), size):
            in_place, arguments = step % 2 == 0, ("kept", step % 3 == rank)
            outcomes[rank] = call(lanes.named[rank], rank + step, elements, polls, in_place, arguments)
        results = [lanes.finish(each)[0] if isinstance(each, Handle) else each for each in outcomes]
        for result in results:
            assert result.shape == (elements,)
            assert (result == total + size * step).all()
    assert all(lane.idle for lane in lanes.named)


@pytest.mark.usefixtures("uncrowded")
@pytest.mark.parametrize("elements", [3, 20_000], ids=["travelling", "laid out"])
def test_the_short_way_and_the_ordinary_one_give_the_same_bits(elements):
    """With 5 ranks the order of additions shows; the coordinator is last, first, or never gets to the short way."""
    rough = [np.random.default_rng(rank).standard_normal(elements) for rank in range(5)]
    expected = rough[0] + rough[1] + rough[2] + rough[3] + rough[4]
    lanes = Lanes(5, config=Config(cache_folder=""))
    for order, polls in ((range(5), 0), ((1, 2, 3, 4, 0), 50), (range(5), 50), ((4, 0, 3, 2, 1), 50)):
        operations = [AllReduce([values], "x", Reduction.SUM) for values in rough]
        for rank in order:
            if not lanes.named[rank].short_way.call(operations[rank], polls):
                lanes.named[rank].submit(operations[rank])
        for result in lanes.finish(*[operation.handle for operation in operations]):
            assert result.tobytes() == expected.tobytes()


@pytest.mark.usefixtures("uncrowded")
@pytest.mark.parametrize("elements", [3, 20_000], ids=["travelling", "laid out"])
def test_values_travel_or_are_laid_out_and_are_counted(elements):
    """Threads, since each rank must wait for the others within its call."""
    lanes = Lanes(2, config=Config(cache_folder=""))
    lanes.finish(*lanes.ask(lambda rank: reduce(rank, elements=elements)))
    before = [(lane.transport.sent_bytes, *dataclasses.astuple(lane._fabric.stats)[:2]) for lane in lanes.named]
    operations = [reduce(rank + 1, elements=elements) for rank in range(2)]

    def main(rank):
        assert lanes.named[rank].short_way.call(operations[rank], 10**6)

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for rank, lane in enumerate(lanes.named):
        assert operations[rank].handle.result().tolist() == [3.0] * elements
        nbytes = 8 * elements
        sent, dense, payload = (
            now - then
            for now, then in zip(
                (lane.transport.sent_bytes, *dataclasses.astuple(lane._fabric.stats)[:2]), before[rank], strict=True
            )
        )
        assert (dense, payload) == (nbytes, nbytes)
        assert sent == (NUMBERED.size + nbytes if elements == 3 else NUMBERED.size)
    shared = lanes.named[0]._fabric.stats.shared_bytes
    assert shared == (0 if elements == 3 else 2 * 8 * elements)  # once each way


def test_what_was_forgotten_is_not_repeated(monkeypatch):
    monkeypatch.setattr(response_cache, "_NUMBERED_CAPACITY", 4)
    lanes = Lanes(1)
    lane = lanes.named[0]
    lanes.finish(*lanes.ask(lambda rank: reduce(1)))
    assert call(lane, 1, 3, 50, True, "kept").finished  # from now on it is known by "kept"
    assert call(lane, 1, 3, 50, True, "kept").tolist() == [1.0] * 3
    lanes.finish(*[h for k in range(5) for h in lanes.ask(lambda rank, k=k: reduce(1, f"new.{k}"))])
    monkeypatch.setattr(response_cache, "_NUMBERED_CAPACITY", 4096)
    values = np.ones(3)
    assert lane.short_way.repeat("kept", "x", values, values, lambda: reduce(1), 50) is False


def test_arguments_without_a_hash_are_no_arguments():
    lanes = Lanes(1)
    values = np.ones(3)
    assert lanes.named[0].short_way.repeat(["x"], "x", values, values, lambda: reduce(1), 50) is False


def test_a_disagreement_on_the_short_way(seed=3):
    lanes = Lanes(2)
    lanes.finish(*lanes.ask(lambda rank: reduce(rank)))
    for odd in (0, 1):
        operations = [reduce(rank, elements=5 if rank == odd else 3) for rank in range(2)]
        for rank in (1, 0):
            if not lanes.named[rank].short_way.call(operations[rank], 4):
                lanes.named[rank].submit(operations[rank])
        for error in lanes.finish(*[operation.handle for operation in operations]):
            assert isinstance(error, DisagreementError)
            assert "(5,)" in str(error)
    assert [r.tolist() for r in lanes.finish(*lanes.ask(lambda rank: reduce(1)))] == [[2.0] * 3] * 2


def test_messages_name_global_ranks():
    lanes = Lanes(2, ranks=(4, 9))
    errors = lanes.finish(*lanes.ask(lambda rank: reduce(1, elements=1 + rank)))
    assert all("rank 4: (1,); rank 9: (2,)" in str(error) for error in errors)
    (got, _) = lanes.finish(*lanes.ask(lambda rank: Broadcast(np.array([rank]), "b", 9)))
    assert got.tolist() == [1]


def test_what_is_remembered_is_forgotten_alike(monkeypatch):
    """Rank 1's own request never changes, while rank 0's does; the coordinator has long forgotten the first."""
    monkeypatch.setattr(response_cache, "_CAPACITY", 4)
    monkeypatch.setattr(response_cache, "_NUMBERED_CAPACITY", 12)
    lanes = Lanes(2, seed=4)
    lanes.finish(*lanes.ask(lambda rank: reduce(1, "first")))
    for rows in range(30):
        handles = lanes.ask(lambda rank, rows=rows: AllGather([np.zeros(1 if rank else rows)], "rows"))
        assert [len(result) for result in lanes.finish(*handles)] == [rows + 1] * 2
    handles = [h for k in range(40) for h in lanes.ask(lambda rank, k=k: reduce(1, f"new.{k}"))]
    handles += lanes.ask(lambda rank: reduce(1, "first"))
    assert all(result.tolist() == [2.0] * 3 for result in lanes.finish(*handles))
    for lane in lanes.named:
        assert len(lane._cache._by_number) <= 12
        assert len(lane._cache._by_signature) <= 4


def test_a_name_under_way_is_refused_and_free_again_afterwards():
    lanes = Lanes(2)
    (first,) = lanes.ask(lambda rank: reduce(1), [0])
    with pytest.raises(ValueError, match="'x' is already under way on this rank"):
        lanes.ask(lambda rank: reduce(2), [0])
    (second,) = lanes.ask(lambda rank: reduce(5), [1])
    assert [r.tolist() for r in lanes.finish(first, second)] == [[6.0] * 3] * 2
    assert [r.tolist() for r in lanes.finish(*lanes.ask(lambda rank: reduce(1)))] == [[2.0] * 3] * 2


def test_after_a_refusal_the_name_may_be_used_before_the_others_have_heard_of_it():
    lanes = Lanes(2, seed=6)
    lanes.named[1].submit(Refusal("allreduce", "x", "a list in place"))
    (waiting,) = lanes.named[1].pending()
    assert (waiting.name, waiting.kind) == ("x", "allreduce")
    later = lanes.ask(lambda rank: reduce(1), [1])
    lanes.poll(5)
    (refused,) = lanes.ask(lambda rank: reduce(1), [0])
    (error,) = lanes.finish(refused)
    assert "rank 1 could not take part: a list in place" in str(error)
    later += lanes.ask(lambda rank: reduce(1), [0])
    assert [r.tolist() for r in lanes.finish(*later)] == [[2.0] * 3] * 2


@pytest.mark.parametrize("joiner", [0, 1, 2])
def test_a_joined_rank_takes_part_and_unnamed_operations_are_numbered_alike_afterwards(joiner):
    lanes = Lanes(3, seed=joiner)
    others = [rank for rank in range(3) if rank != joiner]
    joins = lanes.ask(lambda rank: Join(), [joiner])
    for _ in range(3):
        handles = lanes.ask(lambda rank: reduce(rank + 1, ""), others)
        expected = sum(rank + 1 for rank in others)
        assert [r.tolist() for r in lanes.finish(*handles)] == [[expected] * 3] * 2
    joins += lanes.ask(lambda rank: Join(), others)
    assert len(set(lanes.finish(*joins))) == 1
    assert [r.tolist() for r in lanes.finish(*lanes.ask(lambda rank: reduce(1, "")))] == [[3.0] * 3] * 3


def test_any_thread_may_ask_whether_a_lane_is_idle(monkeypatch):
    """The communication thread does so without the engine's lock: it calls no transport, and alters nobody's answer."""
    lanes = Lanes(2)
    large = 4000  # beyond what is sent before it is received
    for handle in lanes.finish(*lanes.ask(lambda rank: reduce(rank, elements=large))):
        assert handle.tolist() == [1.0] * large
    lane = lanes.named[0]
    for rank in (1, 0):
        assert lanes.named[rank].short_way.call(reduce(rank, elements=large), 3)
    with monkeypatch.context() as forbidden:
        for entry in ("send", "recv", "done", "probe"):
            forbidden.setattr(lane.transport, entry, lambda *_, entry=entry, **__: pytest.fail(f"{entry} was called"))
        assert not lane.idle  # the answer leaves when rank 1 receives it
    lanes.poll(3)
    assert lane.idle

    lanes.ask(lambda rank: reduce(rank, elements=20_000))
    while not lane._in_flight:
        lanes.poll()
    others: list[bool] = []

    def asked_meanwhile(in_flight: InFlight) -> bool:
        if not others:
            others.append(True)
            others[0] = lane.idle
        return bool(in_flight.operations())

    monkeypatch.setattr(InFlight, "__bool__", asked_meanwhile)
    assert (lane.idle, others) == (False, [False])


@pytest.mark.parametrize(("elements", "woken"), [(3, []), (4000, [0])])
def test_an_answer_that_has_not_left_is_looked_after_when_the_caller_has_gone(elements, woken):
    """MPI sends what is not short only while the sender polls, or the receiver would wait for the next call here."""
    lanes = Lanes(2)
    lanes.finish(*lanes.ask(lambda rank: reduce(rank, elements=elements)))
    operations = [reduce(rank, elements=elements) for rank in range(2)]
    for rank in (1, 0):
        assert lanes.named[rank].short_way.call(operations[rank], 3)
    assert operations[0].handle.finished
    assert lanes.woken == woken
    assert lanes.finish(operations[1].handle)[0].tolist() == [1.0] * elements


def test_a_fault_inside_one_operation_fails_it_alone(monkeypatch):
    lanes = Lanes(1)
    bad, good = reduce(1, "bad"), reduce(2, "good")
    monkeypatch.setattr(bad, "result", lambda: 1 / 0)
    for operation in (bad, good):
        lanes.named[0].submit(operation)
    error, result = lanes.finish(bad.handle, good.handle)
    assert isinstance(error, HorovodInternalError)
    assert "'bad' failed on this rank: ZeroDivisionError" in str(error)
    assert result.tolist() == [2.0] * 3


def test_what_cannot_begin_on_one_rank_uses_up_its_place_there(monkeypatch):
    """Without memory for its output, say: messages of later operations are told apart by counting those begun."""
    lanes = Lanes(2)

    def make(rank: int) -> Broadcast:
        return Broadcast(np.full(3, float(rank)), "b", 1)

    lanes.finish(*lanes.ask(make))
    for short in (False, True):
        good, bad = make(1), make(0)
        monkeypatch.setattr(bad, "schedule", lambda *_: bytearray(1 << 62))
        for rank, operation in ((1, good), (0, bad)):
            if not (short and lanes.named[rank].short_way.call(operation, 3)):
                lanes.named[rank].submit(operation)
        assert "'b' failed on this rank: MemoryError" in str(lanes.finish(bad.handle)[0])
        for result in lanes.finish(*lanes.ask(lambda rank: reduce(rank + 1, "next", elements=4000))):
            assert result.tolist() == [3.0] * 4000


def test_what_is_finished_stays_so_when_the_others_are_given_up(monkeypatch):
    lane = Lanes(1).named[0]
    good, bad = reduce(2, "good"), reduce(1, "bad")
    lost = PeerLostError("gone")
    monkeypatch.setattr(bad, "result", lambda: (_ for _ in ()).throw(lost))
    for operation in (good, bad):
        lane.submit(operation)
    with pytest.raises(PeerLostError):
        lane.progress()
    assert [pending.name for pending in lane.pending()] == ["bad"]
    lane.abandon(lost)
    assert good.handle.result().tolist() == [2.0] * 3
    assert bad.handle.error is lost


def test_what_is_kept_of_all_reduces_does_not_grow_with_their_lengths_and_factors():
    fabric = Lanes(1).named[0]._fabric
    kept = []
    for half in range(2):
        for k in range(half * 1500, half * 1500 + 1500):
            fabric.allreduce(np.ones(k), "float64", Reduction.SUM, postscale=1.0 + k)
        gc.collect()
        kept.append(len(gc.get_objects()))
    assert kept[1] < kept[0] + 100


def test_shutdown_fails_what_waits_and_says_so():
    lanes = Lanes(2)
    handles = lanes.ask(lambda rank: reduce(1, "never"), [0]) + lanes.ask(lambda rank: reduce(1, "queued"), [0])
    lanes.named[0].progress()
    lanes.named[0].abandon()
    for handle in handles:
        with pytest.raises(ShutDownError, match="synchronize every handle before it"):
            handle.result()
    assert lanes.named[0].idle


def test_a_lost_peer_is_told_to_the_engine():
    lanes = Lanes(2, config=None)
    large = 4000  # beyond what is sent before it is received
    lanes.ask(lambda rank: reduce(1, elements=large))
    lanes.network.kill(1)
    with pytest.raises(PeerLostError):
        for _ in range(10):
            lanes.named[0].progress()
            lanes.named[1].progress()


@pytest.mark.usefixtures("uncrowded")
@pytest.mark.parametrize(
    ("room_bytes", "laid_out_bytes"), [(1 << 40, 4 << 20), (5 << 20, 1 << 20), (1 << 20, -1)]
)
def test_what_shared_memory_has_room_for_is_laid_out(monkeypatch, room_bytes, laid_out_bytes):
    create = sharing.SharedBlock.create

    def create_within(nbytes, **options):
        if nbytes > room_bytes:
            raise NoRoomError("no room")
        return create(nbytes, **options)

    monkeypatch.setattr(sharing.SharedBlock, "create", create_within)
    lanes = Lanes(2, config=Config(cache_folder=""))
    for elements in (20_000, 200_000, 400_000):
        for _ in range(2):
            for result in lanes.finish(*lanes.ask(lambda rank, n=elements: reduce(rank + 1, elements=n))):
                assert result.tolist() == [3.0] * elements
    assert {lane._fabric.laid_out_bytes for lane in lanes.named} == {laid_out_bytes}
    assert {len(lane._fabric.laid_out_areas) for lane in lanes.named} == {2 if laid_out_bytes > 0 else 0}
