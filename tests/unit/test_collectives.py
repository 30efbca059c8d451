"""Every algorithm by messages, in virtual time and in random order, against values by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horo_lite.collectives import algorithms
from horo_lite.errors import ArgumentError
from tests.contracts import collectives as contract
from tests.contracts.runners import InterleavedRunner, SimulatedRunner

SIZES = range(1, 10)
sizes = st.integers(1, 9)
seeds = st.integers(0, 2**32)


def runners(size: int, seed: int = 3) -> list[contract.Runner]:
    return [SimulatedRunner(size), InterleavedRunner(size, seed)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", contract.ALLREDUCE)
def test_allreduce_sums_any_length_in_any_segments(name: str, size: int) -> None:
    run = SimulatedRunner(size)
    for elements in contract.ELEMENTS:
        contract.check_allreduce(run, name, elements)
        contract.check_allreduce(run, name, elements, segment_elements=1 + elements // 12)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("reduction", ["average", "min", "max", "product"])
@pytest.mark.parametrize("name", contract.ALLREDUCE)
def test_allreduce_serves_every_reduction(name: str, reduction: str, size: int) -> None:
    contract.check_allreduce(
        SimulatedRunner(size), name, 13, reduction=reduction, segment_elements=2
    )


@pytest.mark.parametrize("size", SIZES)
def test_hierarchical_serves_every_layout_of_nodes(size: int) -> None:
    run = SimulatedRunner(size)
    for nodes in contract.node_layouts(size):
        for elements in (0, 1, 5, 64):
            contract.check_allreduce(run, "hierarchical", elements, nodes=nodes, segment_elements=8)
        contract.check_allreduce(run, "hierarchical", 7, nodes=nodes, reduction="average")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", contract.WIDE_ALLREDUCE)
def test_sixteen_bit_sums_are_rounded_once(name: str, size: int) -> None:
    for elements in (0, 1, 5, 64):
        contract.check_rounded_once(SimulatedRunner(size), name, elements)


def test_which_algorithms_serve_wide_kernels() -> None:
    wide = {name for name, entry in algorithms("allreduce").items() if entry.wide}
    assert wide == {*contract.WIDE_ALLREDUCE, "shared"}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", contract.ALLREDUCE)
def test_all_ranks_hold_the_same_bits(name: str, size: int) -> None:
    for elements in (1, 7, 323):
        for dtype in (np.float32, np.float16) if name in contract.WIDE_ALLREDUCE else (np.float32,):
            results = contract.reduce_rough(SimulatedRunner(size), name, elements, dtype)
            again = contract.reduce_rough(InterleavedRunner(size, 5), name, elements, dtype)
            assert len({*results.values(), *again.values()}) == 1


def test_a_nan_keeps_its_payload_everywhere() -> None:
    """Which of two NaN survives an addition depends on the order of its operands."""
    nans = np.array([0x7FC00001, 0x7FC00002, 0x7FC00003], np.uint32).view(np.float32)
    for name in (
        "ring",
        "recursive_doubling",
        "halving_doubling",
        "hierarchical",
        "gathered",
        "pairwise",
    ):
        for size in (2, 3, 4, 7):
            buffers = [np.repeat(nans[rank % 3 : rank % 3 + 1], 9) for rank in range(size)]
            entry = algorithms("allreduce")[name]
            kernel = contract.ReferenceKernel(np.float32)
            SimulatedRunner(size)(
                lambda rank: entry(
                    contract.Group.whole(rank, size), buffers[rank], kernel, nodes=[range(size)]
                )
            )
            assert len({buffer.tobytes() for buffer in buffers}) == 1, (name, size)


@settings(max_examples=150, deadline=None)
@given(
    size=sizes,
    elements=st.integers(0, 70),
    segment=st.integers(1, 80),
    name=st.sampled_from(contract.ALLREDUCE),
    seed=seeds,
)
def test_allreduce_in_any_order(
    size: int, elements: int, segment: int, name: str, seed: int
) -> None:
    run = InterleavedRunner(size, seed)
    nodes = contract.node_layouts(size)[seed % len(contract.node_layouts(size))]
    contract.check_allreduce(run, name, elements, segment_elements=segment, nodes=nodes)


def counts_of(maximum: int = 9) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, maximum), min_size=1, max_size=9)


@settings(max_examples=100, deadline=None)
@given(
    counts=counts_of(),
    segment=st.integers(1, 12),
    seed=seeds,
    name=st.sampled_from(["ring", "pairwise"]),
)
def test_reduce_scatter_uneven(counts: list[int], segment: int, seed: int, name: str) -> None:
    for run in runners(len(counts), seed):
        contract.check_reduce_scatter(run, name, counts, segment_elements=segment)


@settings(max_examples=100, deadline=None)
@given(
    counts=counts_of(),
    segment=st.integers(1, 12),
    seed=seeds,
    name=st.sampled_from(["ring", "bruck"]),
)
def test_allgather_ragged(counts: list[int], segment: int, seed: int, name: str) -> None:
    for run in runners(len(counts), seed):
        contract.check_allgather(run, name, counts, segment_elements=segment)


@settings(max_examples=100, deadline=None)
@given(
    size=sizes,
    elements=st.integers(0, 20),
    root=st.integers(0, 8),
    segment=st.integers(1, 12),
    seed=seeds,
    name=st.sampled_from(["binomial", "chain", "native"]),
)
def test_broadcast_from_any_root(
    size: int, elements: int, root: int, segment: int, seed: int, name: str
) -> None:
    for run in runners(size, seed):
        contract.check_broadcast(run, name, elements, root % size, segment_elements=segment)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=sizes, seed=seeds)
def test_alltoall_with_splits(data: st.DataObject, size: int, seed: int) -> None:
    row = st.lists(st.integers(0, 4), min_size=size, max_size=size)
    splits = data.draw(st.lists(row, min_size=size, max_size=size))
    for run in runners(size, seed):
        contract.check_alltoall(run, "pairwise", splits)


@pytest.mark.parametrize("size", SIZES)
def test_nobody_leaves_a_barrier_before_all_have_entered(size: int) -> None:
    barrier = algorithms("barrier")["dissemination"]
    for seed in range(20):
        entered: set[int] = set()

        def program(rank: int) -> contract.Schedule:
            entered.add(rank)
            yield from barrier(contract.Group.whole(rank, size))
            assert len(entered) == size

        InterleavedRunner(size, seed)(program)


def test_a_schedule_serves_a_group_that_is_not_the_whole_world() -> None:
    members = (4, 1, 3)
    buffers = [np.full(5, 10.0**rank) for rank in range(5)]
    ring = algorithms("allreduce")["ring"]
    kernel = contract.ReferenceKernel()

    def program(rank: int) -> contract.Schedule | None:
        if rank not in members:
            return None
        return ring(contract.Group(members, members.index(rank)), buffers[rank], kernel)

    SimulatedRunner(5)(program)
    for rank in range(5):
        assert (buffers[rank] == (11010.0 if rank in members else 10.0**rank)).all()


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match="binomial, chain, native"):
        contract.algorithm("broadcast", "star")
    with pytest.raises(ArgumentError, match="allgather, allreduce"):
        contract.algorithm("scan", "ring")
