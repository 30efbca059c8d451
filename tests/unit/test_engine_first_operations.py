"""Many operations at once as the first ones of all: what they choose by comes into being while they are under way.

Ranks are polled at random, some far more often than others, so that one has finished what another has not begun.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from horo_lite.compression import Compression, resolve
from horo_lite.config import Config
from horo_lite.engine import fabric, sharing, trial
from horo_lite.engine.operations import AllGather, AllReduce, Broadcast, ReduceScatter
from horo_lite.interfaces import Reduction
from horo_lite.transport.shared import NoRoomError
from tests.unit.worlds import Lanes

SIZES = (3, 700, 6_000, 20_000, 50_000, 200_000)  # of float64: from what goes with a request to 1.6 MB
ROUNDS = 400_000


@pytest.fixture(autouse=True)
def quick_and_uncrowded(monkeypatch):
    monkeypatch.setattr(fabric, "is_crowded", lambda ranks: False)
    monkeypatch.setattr(trial, "_BUDGET_S", -1.0)
    small = {wide: tuple(t._replace(size_bytes=16 << 10) for t in trials) for wide, trials in trial._TRIALS.items()}
    monkeypatch.setattr(trial, "_TRIALS", small)


def submit_and_poll(lanes, operations, order):
    """Each rank's operations, in runs of polls of random lengths, until all are finished."""
    waiting = [list(each) for each in operations]
    handles = [made.handle for each in operations for made in each]
    for _ in range(ROUNDS):
        if all(handle.finished for handle in handles):
            return
        rank = order.randrange(lanes.size)
        if waiting[rank] and order.random() < 0.3:
            lanes.named[rank].submit(waiting[rank].pop(0))
        for _ in range(order.choice((1, 1, 3, 100))):
            lanes.named[rank].progress()
    raise AssertionError(f"not finished: {[handle.name for handle in handles if not handle.finished]}")


def operation(kind, elements, name, rank, size):
    values = np.full(elements, rank + 1.0)
    if kind == "allreduce":
        return AllReduce([values], name, Reduction.SUM)
    if kind == "group":
        return AllReduce([values, values[:3]], name, Reduction.SUM, grouped=True)
    if kind == "compressed":
        return AllReduce([values], name, Reduction.SUM, compressor=resolve(Compression.bf16), states=[{}])
    if kind == "broadcast":
        return Broadcast(values, name, size - 1)
    if kind == "allgather":
        return AllGather([values], name)
    return ReduceScatter([values], name, Reduction.SUM)


def expected(kind, elements, rank, size):
    total = size * (size + 1) / 2
    if kind == "broadcast":
        return [float(size)] * elements
    if kind == "allgather":
        return [r + 1.0 for r in range(size) for _ in range(elements)]
    if kind == "reducescatter":
        return [total] * (elements // size + (rank < elements % size))
    return [total] * elements


@pytest.mark.parametrize("seed", [0, 3, 7])
@pytest.mark.parametrize(
    ("size", "nodes", "room_bytes"),
    [(2, 1, 1 << 40), (2, 1, 5 << 20), (2, 1, 0), (3, 1, 1 << 40), (3, 1, 5 << 20), (2, 2, 1 << 40), (4, 2, 1 << 40)],
)
def test_the_first_operations_all_at_once(size, nodes, room_bytes, seed, monkeypatch):
    create = sharing.SharedBlock.create

    def create_within(nbytes, **options):
        if nbytes > room_bytes:
            raise NoRoomError("no room")
        return create(nbytes, **options)

    monkeypatch.setattr(sharing.SharedBlock, "create", create_within)
    order = random.Random(seed)
    kinds = ("allreduce", "allreduce", "allreduce", "group", "compressed", "broadcast", "allgather", "reducescatter")
    wanted = [(order.choice(kinds), order.choice(SIZES), f"op.{k}") for k in range(12)]
    lanes = Lanes(size, seed, Config(cache_folder=""), nodes=nodes)
    asked = [order.sample(wanted, len(wanted)) for _ in range(size)]
    made = [
        [operation(kind, elements, name, rank, size) for kind, elements, name in asked[rank]] for rank in range(size)
    ]
    submit_and_poll(lanes, made, order)
    for rank in range(size):
        for (kind, elements, name), each in zip(asked[rank], made[rank], strict=True):
            result = each.handle.result()
            first = result[0] if kind == "group" else result
            assert first.tolist() == expected(kind, elements, rank, size), (name, kind, rank)
