"""Tensors that stay tensors over real messages: staged through host memory, and handed to MPI as they are.

On the ``device`` of the run. Host tensors take both ways too, so most of it is tested without a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from horo_lite.arrays import kernel  # noqa: E402
from horo_lite.collectives import algorithm  # noqa: E402
from horo_lite.config import Config  # noqa: E402
from horo_lite.interfaces import Group, Reduction, Schedule  # noqa: E402
from horo_lite.transport import cuda  # noqa: E402
from horo_lite.transport.driver import run as drive  # noqa: E402
from horo_lite.transport.mpi_transport import MPITransport  # noqa: E402
from tests.contracts.collectives import ALLREDUCE, WIDE_ALLREDUCE  # noqa: E402

pytestmark = pytest.mark.ranks(2, 3)

CHUNK_ELEMENTS = 1000  # below the longest tensor here, so that one message becomes several of MPI's
LENGTHS = (0, 1, 7, 1023, 50_003)


@pytest.fixture(params=["staged", "direct"])
def run(hvd: Any, device: str, request: pytest.FixtureRequest) -> Iterator[Callable[[Schedule], Any]]:
    from mpi4py import MPI

    direct = request.param == "direct"
    if direct and device != "cpu" and not cuda.is_aware(Config.from_environment().cuda_aware):
        pytest.skip("direct needs HORO_LITE_CUDA_AWARE=probe, or on, and an MPI library that takes device memory")
    comm = MPI.COMM_WORLD.Dup()
    transport = MPITransport(comm, CHUNK_ELEMENTS, cuda_aware=direct)
    yield lambda schedule: drive(schedule, transport)
    comm.Free()


def place(device: str) -> str:
    """What the kernels call the device of tensors that stay tensors."""
    return "torch-cpu" if device == "cpu" else device


@pytest.mark.parametrize("name", ALLREDUCE)
def test_allreduce(hvd, device, run, name):
    size, rank = hvd.size(), hvd.rank()
    arithmetic = kernel("float32", Reduction.SUM, size, device=place(device))
    for elements in LENGTHS:
        places = torch.arange(elements, device=device) % 11
        tensor = (places + rank).float()
        run(
            algorithm("allreduce", name)(
                Group.whole(rank, size), tensor, arithmetic, segment_elements=4096, nodes=[range(size)],
                reduction=Reduction.SUM,
            )
        )
        assert torch.equal(tensor, (size * places + size * (size - 1) // 2).float())


@pytest.mark.parametrize("name", WIDE_ALLREDUCE)
def test_bfloat16_is_rounded_once(hvd, device, run, name):
    size, rank = hvd.size(), hvd.rank()
    arithmetic = kernel("bfloat16", Reduction.SUM, size, device=place(device))
    tensor = torch.full((5000,), 256 if rank == 0 else 1, dtype=torch.bfloat16, device=device)
    run(algorithm("allreduce", name)(Group.whole(rank, size), tensor, arithmetic, segment_elements=512))
    assert torch.equal(tensor, torch.full_like(tensor, 256.0 + size - 1))


@pytest.mark.parametrize("name", ["binomial", "chain", "native"])
def test_broadcast(hvd, device, run, name):
    size, rank = hvd.size(), hvd.rank()
    for elements in LENGTHS:
        tensor = torch.arange(elements, device=device) + 1000 * rank
        run(algorithm("broadcast", name)(Group.whole(rank, size), tensor, size - 1, segment_elements=4096))
        assert torch.equal(tensor, torch.arange(elements, device=device) + 1000 * (size - 1))
