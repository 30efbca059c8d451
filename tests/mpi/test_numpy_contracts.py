"""Every algorithm on MPI itself: the bodies that the simulator runs, on the ranks of this job."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from horo_lite.collectives.registry import algorithms
from horo_lite.transport.driver import run
from tests.contracts import collectives as contract

TAGS = itertools.count(1)


class RankRunner:
    """Runs the schedule of this rank; the others run theirs."""

    def __init__(self, transport) -> None:
        self._transport = transport
        self.size = transport.size
        self.ranks = [transport.rank]

    def __call__(self, program):
        return run(program(self._transport.rank), self._transport, next(TAGS))


@pytest.fixture(scope="module")
def transport():
    from mpi4py import MPI

    from horo_lite.transport.mpi_transport import MPITransport

    space = MPITransport(MPI.COMM_WORLD.Dup(), 1 << 30)
    yield space
    space.close()


@pytest.fixture
def ranks(hvd, transport):
    return RankRunner(transport)


@pytest.mark.parametrize("name", contract.ALLREDUCE)
def test_allreduce(ranks, name):
    for elements, segment, nodes in itertools.product((0, 1, 7, 1023), (4, 1 << 18), contract.node_layouts(ranks.size)):
        contract.check_allreduce(ranks, name, elements, segment_elements=segment, nodes=nodes)
    for reduction in ("min", "max", "product"):
        contract.check_allreduce(ranks, name, 5, reduction=reduction)


@pytest.mark.parametrize("name", contract.WIDE_ALLREDUCE)
def test_sixteen_bits_are_rounded_once(ranks, name):
    for elements in (1, 5, 1023):
        contract.check_rounded_once(ranks, name, elements)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("name", contract.ALLREDUCE)
def test_the_same_bits_on_every_rank(hvd, ranks, name):
    if name == "native":
        pytest.skip("the library decides how it adds")
    (own,) = contract.reduce_rough(ranks, name, 1023).values()
    assert len(set(hvd.allgather_object(own))) == 1


@pytest.mark.parametrize("name", algorithms("reduce_scatter"))
def test_reduce_scatter(ranks, name):
    for length in (0, 1, 5, 300):
        contract.check_reduce_scatter(ranks, name, [length + place for place in range(ranks.size)])


@pytest.mark.parametrize("name", algorithms("allgather"))
def test_allgather(ranks, name):
    for counts in ([3] * ranks.size, list(range(ranks.size)), [0] * ranks.size):
        contract.check_allgather(ranks, name, counts, segment_elements=2)


@pytest.mark.parametrize("name", algorithms("broadcast"))
def test_broadcast(ranks, name):
    for elements, root in itertools.product((0, 1, 1023), range(ranks.size)):
        contract.check_broadcast(ranks, name, elements, root, segment_elements=100)


@pytest.mark.parametrize("name", algorithms("alltoall"))
def test_alltoall(ranks, name):
    contract.check_alltoall(ranks, name, [[(r + 2 * j) % 3 for j in range(ranks.size)] for r in range(ranks.size)])


@pytest.mark.parametrize("name", algorithms("adasum"))
def test_adasum(ranks, name):
    contract.check_adasum_of_equals(ranks, name, 7)
    contract.check_adasum_of_orthogonals(ranks, name)


def test_large_messages_are_received_while_others_are_sent(ranks):
    contract.check_allreduce(ranks, "ring", 200_001, dtype=np.float32, segment_elements=10_000)
    contract.check_allreduce(ranks, "pairwise", 200_001, dtype=np.float32)
