"""Exact sums and the stated counts at 256 ranks, and at 1,024 where there is time."""

from __future__ import annotations

import numpy as np
import pytest

from horo_lite.collectives import Work, algorithm
from horo_lite.interfaces import Group
from horo_lite.transport.network_model import NetworkModel
from horo_lite.transport.simulator import Outcome, Simulator
from tests.contracts.reference_kernel import ReferenceKernel

PER_NODE = 8


def run(operation: str, name: str, size: int, buffers: list[np.ndarray]) -> Outcome:
    elements = len(buffers[0])
    simulator = Simulator(size, NetworkModel(ranks_per_node=PER_NODE))
    kernel = ReferenceKernel(np.float32)
    nodes = [range(first, first + PER_NODE) for first in range(0, size, PER_NODE)]
    entry = algorithm(operation, name)
    outcome = simulator.run(
        lambda rank: entry(Group.whole(rank, size), buffers[rank], kernel, nodes=nodes)
    )
    cost = entry.cost(Work(elements, size, PER_NODE))
    assert set(outcome.messages) == {cost.messages}
    assert set(outcome.sent_bytes) == {4 * (cost.sent + cost.local_sent) + cost.control_bytes}
    return outcome


def check_allreduce(name: str, size: int) -> None:
    elements = 2 * size
    places = np.arange(elements, dtype=np.float32)
    buffers = [places + rank for rank in range(size)]
    run("allreduce", name, size, buffers)
    expected = size * places + size * (size - 1) // 2
    for buffer in buffers:
        np.testing.assert_array_equal(buffer, expected)


def check_adasum(size: int) -> None:
    """Gradients in eight directions: equal ones stay, orthogonal ones add up."""
    elements = size
    buffers = [np.zeros(elements, np.float32) for _ in range(size)]
    for rank, buffer in enumerate(buffers):
        direction = rank * 8 // size
        buffer[direction] = direction + 1
    run("adasum", "halving_doubling", size, buffers)
    for buffer in buffers:
        np.testing.assert_array_equal(buffer[:8], np.arange(1, 9))
        assert not buffer[8:].any()


@pytest.mark.parametrize("name", ["ring", "hierarchical", "recursive_doubling", "halving_doubling"])
def test_256_ranks(name: str) -> None:
    check_allreduce(name, 256)


def test_adasum_of_256_ranks() -> None:
    check_adasum(256)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring", "hierarchical", "recursive_doubling", "halving_doubling"])
def test_1024_ranks(name: str) -> None:
    check_allreduce(name, 1024)


@pytest.mark.slow
def test_adasum_of_1024_ranks() -> None:
    check_adasum(1024)
