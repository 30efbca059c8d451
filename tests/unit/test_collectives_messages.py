"""All-reduce, reduce-scatter, all-gather, broadcast, all-to-all and barrier by messages, on the simulator."""

from __future__ import annotations

import numpy as np
import pytest

from horo_lite.collectives import Work, algorithm
from horo_lite.interfaces import Group
from horo_lite.transport.network_model import NetworkModel
from horo_lite.transport.simulator import Simulator
from tests.contracts.reference_kernel import ReferenceKernel

SIZES = (0, 1, 2, 3, 5, 7, 64, 1023)


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("name", ["ring", "pairwise"])
def test_allreduce_sums_and_costs_what_it_says(name: str, size: int, elements: int) -> None:
    entry = algorithm("allreduce", name)
    for segment_elements in (3, 10, 1 << 18):
        buffers = [np.arange(elements, dtype=np.float64) + rank for rank in range(size)]
        expected = size * np.arange(elements) + size * (size - 1) // 2
        kernel = ReferenceKernel()
        outcome = Simulator(size, NetworkModel.counting_steps()).run(
            lambda rank: entry(Group.whole(rank, size), buffers[rank], kernel, segment_elements=segment_elements)
        )
        for buffer in buffers:
            np.testing.assert_array_equal(buffer, expected)
        cost = entry.cost(Work(elements, size, segment_elements=segment_elements))
        assert max(outcome.messages) <= cost.messages
        assert max(outcome.sent_bytes) <= 8 * cost.sent
        if elements % size == 0:
            assert set(outcome.messages) == {cost.messages}
            assert set(outcome.sent_bytes) == {8 * cost.sent}
        if segment_elements >= elements:
            assert outcome.elapsed_s == cost.steps
