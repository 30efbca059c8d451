"""Every algorithm on real messages: the bodies that also run on the simulator, carried out by the MPI driver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from horo_lite.transport.mpi_transport import MPITransport
from tests.contracts import collectives as contract
from tests.contracts.runners import DriverRunner, SimulatedRunner

CHUNK_ELEMENTS = 1000  # below the longest buffer here, so that one message becomes several of MPI's


@pytest.fixture
def run(hvd: Any) -> Iterator[DriverRunner]:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    yield DriverRunner(MPITransport(comm, CHUNK_ELEMENTS))
    comm.Free()


@pytest.mark.parametrize("name", contract.ALLREDUCE)
def test_allreduce(run, name):
    for elements in (*contract.ELEMENTS, 100_003):
        contract.check_allreduce(run, name, elements)
        contract.check_allreduce(run, name, elements, segment_elements=1 + elements // 12)


@pytest.mark.parametrize("reduction", ["average", "min", "max", "product"])
@pytest.mark.parametrize("name", contract.ALLREDUCE)
def test_reductions(run, name, reduction):
    contract.check_allreduce(run, name, 13, reduction=reduction, segment_elements=2)


def test_layouts_of_nodes(run):
    for nodes in contract.node_layouts(run.size):
        for elements in (0, 1, 5, 1023):
            contract.check_allreduce(
                run, "hierarchical", elements, nodes=nodes, segment_elements=64
            )


@pytest.mark.parametrize("name", contract.WIDE_ALLREDUCE)
def test_sixteen_bit_sums_are_rounded_once(run, name):
    for elements in (0, 1, 5, 1023):
        contract.check_rounded_once(run, name, elements)


@pytest.mark.parametrize("name", [name for name in contract.ALLREDUCE if name != "native"])
def test_the_bits_are_those_of_the_simulator(run, name):
    simulated = contract.reduce_rough(SimulatedRunner(run.size), name, 1023)
    for rank, result in contract.reduce_rough(run, name, 1023).items():
        assert result == simulated[rank]


@pytest.mark.parametrize("name", ["ring", "pairwise"])
def test_reduce_scatter(run, name):
    for counts in ([7] * run.size, list(range(run.size)), [0] * (run.size - 1) + [1500]):
        contract.check_reduce_scatter(run, name, counts, segment_elements=100)


@pytest.mark.parametrize("name", ["ring", "bruck"])
def test_allgather(run, name):
    for counts in ([7] * run.size, list(range(run.size)), [0] * (run.size - 1) + [1500]):
        contract.check_allgather(run, name, counts, segment_elements=100)


@pytest.mark.parametrize("name", ["binomial", "chain", "native"])
def test_broadcast(run, name):
    for root in range(run.size):
        for elements in (0, 1, 1023, 100_003):
            contract.check_broadcast(run, name, elements, root, segment_elements=10_000)


def test_alltoall(run):
    size = run.size
    contract.check_alltoall(
        run, "pairwise", [[(row + column) % 3 for column in range(size)] for row in range(size)]
    )
    contract.check_alltoall(run, "pairwise", np.full((size, size), 2000).tolist())


def test_adasum(run):
    contract.check_adasum_of_equals(run, "halving_doubling", 1023)
    contract.check_adasum_of_orthogonals(run, "halving_doubling")
