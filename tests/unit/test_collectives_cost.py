"""Every docstring's formula, as its cost function states it, against what the simulator counts.

Across nodes a message takes 1,000 and within a node 1, bytes take no time: so virtual time is the
number of steps of either kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from horo_lite.collectives import Algorithm, Work, algorithm, algorithms, operations, partition
from horo_lite.interfaces import Array, Group, Schedule
from horo_lite.transport.network_model import NetworkModel
from horo_lite.transport.simulator import Outcome, Simulator
from tests.contracts.reference_kernel import ReferenceKernel

ITEM_BYTES = 8


def run(entry: Algorithm, work: Work) -> Outcome:
    """Run ``entry`` on a cluster of even nodes; the values are checked elsewhere."""
    size, elements, per_node = work.size, work.elements, work.ranks_per_node
    network = dataclasses.replace(
        NetworkModel.counting_steps(), latency_s=1000.0, ranks_per_node=per_node
    )
    simulator = Simulator(size, network)
    kernel = simulator.timed(ReferenceKernel())
    nodes = [range(first, first + per_node) for first in range(0, size, per_node)]
    counts = partition.even_counts(elements, size)
    offsets = partition.even_offsets(elements, size)
    staging = [np.zeros(3 * work.segment_elements) for _ in range(size)]
    buffers = [np.ones(elements) for _ in range(size)]

    def peers(rank: int) -> list[Array]:
        return [buffers[peer] for peer in nodes[rank // per_node]]

    arguments: dict[str, Callable[[int], tuple]] = {
        "allreduce": lambda rank: (buffers[rank], kernel),
        "adasum": lambda rank: (buffers[rank], kernel),
        "resident_allreduce": lambda rank: (buffers[rank], peers(rank), kernel),
        "reduce_scatter": lambda rank: (buffers[rank], counts, kernel),
        "allgather": lambda rank: (buffers[rank], counts),
        "broadcast": lambda rank: (buffers[rank], size // 2),
        "alltoall": lambda rank: (
            partition.chunks(buffers[rank], offsets),
            [np.zeros(counts[rank]) for _ in range(size)],
        ),
        "barrier": lambda rank: (),
    }

    def program(rank: int) -> Schedule:
        return entry(
            Group.whole(rank, size),
            *arguments[entry.operation](rank),
            nodes=nodes,
            staging=staging,
            segment_elements=work.segment_elements,
        )

    return simulator.run(program)


def check(entry: Algorithm, work: Work) -> None:
    outcome, cost = run(entry, work), entry.cost(work)
    messages, steps = max(outcome.messages), outcome.elapsed_s
    sent_bytes, combined_bytes = max(outcome.sent_bytes), max(outcome.combined_bytes)
    across = 1000 if work.size > work.ranks_per_node else 1
    stated_steps = across * cost.steps + cost.local_steps
    stated_bytes = ITEM_BYTES * (cost.sent + cost.local_sent) + cost.control_bytes
    assert messages <= cost.messages
    assert sent_bytes <= stated_bytes
    assert steps <= stated_steps
    if work.size & (work.size - 1) == 0 or entry.name not in LOGARITHMIC:
        assert steps == stated_steps
    if work.elements % EVEN == 0:
        assert sent_bytes == stated_bytes
        if entry.name not in ("bruck", "gathered"):  # a range of chunks is one message or two
            assert messages == cost.messages
    if entry.operation != "adasum" and work.size > 1:
        assert combined_bytes <= ITEM_BYTES * cost.combined
        if work.elements % EVEN == 0 and entry.name != "shared":
            assert combined_bytes == ITEM_BYTES * cost.combined


EVEN = 8 * 9 * 5 * 7  # what all numbers of ranks here divide
EXACT = ("ring", "pairwise")  # their bytes between nodes, for any even nodes
LOGARITHMIC = ("binomial", "recursive_doubling", "halving_doubling")
"""Their steps are an upper bound unless N is a power of two: not every rank is on the longest
chain."""

MEASURABLE = [
    (operation, name)
    for operation in operations()
    for name, entry in algorithms(operation).items()
    if name != "native"  # the library's costs are its own
]
TWO_LEVEL = [(operation, name) for operation, name in MEASURABLE if name == "hierarchical"]
ONE_NODE = [("allreduce", "shared"), ("resident_allreduce", "flat")]


@pytest.mark.parametrize("size", [4, 6, 8, 9, 16])
@pytest.mark.parametrize(
    ("operation", "name"), [entry for entry in MEASURABLE if entry not in TWO_LEVEL + ONE_NODE]
)
def test_flat_algorithms_say_how_much_leaves_a_node(operation: str, name: str, size: int) -> None:
    """Their steps across nodes are not told apart, so here only bytes count."""
    for per_node in (2, 3, 4):
        if size % per_node == 0:
            work = Work(2 * EVEN, size, per_node)
            outcome, cost = (
                run(algorithm(operation, name), work),
                algorithm(operation, name).cost(work),
            )
            crossing_bytes, stated_bytes = max(outcome.crossing_bytes), ITEM_BYTES * cost.crossing
            assert crossing_bytes <= stated_bytes + work.size * cost.control_bytes
            powers_of_two = size & (size - 1) == 0 == per_node & (per_node - 1)
            if operation not in ("adasum", "broadcast") and (powers_of_two or name in EXACT):
                assert crossing_bytes == stated_bytes


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize(
    ("operation", "name"), [entry for entry in MEASURABLE if entry not in TWO_LEVEL + ONE_NODE]
)
def test_flat_algorithms_cost_what_they_say(operation: str, name: str, size: int) -> None:
    for elements in (0, 1, 5, EVEN):
        for segment_elements in (64, 1 << 18):
            work = Work(elements, size, segment_elements=segment_elements)
            check(algorithm(operation, name), work)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize(("operation", "name"), ONE_NODE)
def test_algorithms_in_shared_memory_cost_what_they_say(
    operation: str, name: str, size: int
) -> None:
    for elements in (0, 1, 5, EVEN):
        for segment_elements in (72, 1 << 12):
            work = Work(elements, size, ranks_per_node=size, segment_elements=segment_elements)
            check(algorithm(operation, name), work)


@pytest.mark.parametrize(
    ("size", "per_node"), [(1, 1), (2, 1), (2, 2), (4, 2), (6, 2), (6, 3), (8, 4), (9, 3), (8, 8)]
)
@pytest.mark.parametrize(("operation", "name"), TWO_LEVEL)
def test_two_level_algorithms_cost_what_they_say(
    operation: str, name: str, size: int, per_node: int
) -> None:
    for elements in (0, 1, 5, EVEN):
        for segment_elements in (16, 1 << 18):
            check(algorithm(operation, name), Work(elements, size, per_node, segment_elements))


def test_every_algorithm_states_its_steps_and_bytes() -> None:
    for operation in operations():
        for name, entry in algorithms(operation).items():
            text = (entry.schedule.__doc__ or "").lower()
            assert "steps" in text, (operation, name)
            assert "sent" in text or "bytes" in text, (operation, name)
