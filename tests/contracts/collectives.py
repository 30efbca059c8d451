"""What every collective algorithm must do, whatever runs its schedule.

Each body takes a ``Runner``, which has the ranks that live in this process: all of them in the
simulator, its own one under mpirun. Expected values are by hand arithmetic and true for any number
of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from horo_lite.collectives import algorithm, partition
from horo_lite.interfaces import Array, Group, Reduction, Schedule
from tests.contracts.reference_kernel import ReferenceKernel

ELEMENTS = (0, 1, 2, 3, 5, 7, 64, 1023)
SEGMENT_ELEMENTS = (4, 1 << 18)

ALLREDUCE = (
    "ring",
    "pairwise",
    "recursive_doubling",
    "halving_doubling",
    "gathered",
    "hierarchical",
    "native",
)
"""The all-reduce algorithms that need nothing but messages."""

WIDE_ALLREDUCE = ("pairwise", "gathered")


class Runner(Protocol):
    """Runs one schedule on every rank."""

    size: int
    ranks: Sequence[int]
    """The ranks of this process."""

    def __call__(self, program: Callable[[int], Schedule]) -> Any:
        """Run ``program(rank)`` to its end on every rank of this process."""
        ...


def node_layouts(size: int) -> list[tuple[tuple[int, ...], ...]]:
    """Ways of spreading the ranks over nodes: each alone, all together, in twos, and unevenly."""
    ranks = tuple(range(size))
    layouts = [tuple((rank,) for rank in ranks), (ranks,)]
    if size > 2:
        layouts.append(tuple(ranks[start : start + 2] for start in range(0, size, 2)))
        layouts.append((ranks[: size // 2 + 1], ranks[size // 2 + 1 :]))
    return layouts


def check_allreduce(
    run: Runner,
    name: str,
    elements: int,
    *,
    dtype: np.typing.DTypeLike = np.float64,
    reduction: str = "sum",
    segment_elements: int = 1 << 18,
    nodes: Sequence[Sequence[int]] = (),
) -> None:
    """Rank r contributes i + r in place i (r + 1 for Product)."""
    size = run.size
    places = np.arange(elements) % 11
    inputs = [
        places + rank if reduction != "product" else np.full(elements, rank + 1)
        for rank in range(size)
    ]
    expected = {
        "sum": size * places + size * (size - 1) // 2,
        "average": places + (size - 1) / 2,
        "min": places,
        "max": places + size - 1,
        "product": np.full(elements, np.prod(np.arange(1, size + 1))),
    }[reduction]
    buffers = {rank: inputs[rank].astype(dtype) for rank in run.ranks}
    kernel = ReferenceKernel(dtype, reduction, size)
    entry = algorithm("allreduce", name)
    mpi_reduction = Reduction[reduction.upper()]
    run(
        lambda rank: entry(
            Group.whole(rank, size),
            buffers[rank],
            kernel,
            segment_elements=segment_elements,
            nodes=nodes or [range(size)],
            reduction=mpi_reduction,
        )
    )
    for rank in run.ranks:
        np.testing.assert_array_equal(
            buffers[rank], expected.astype(dtype), err_msg=f"{name}, rank {rank}"
        )


def rough_inputs(
    size: int, elements: int, dtype: np.typing.DTypeLike = np.float32, seed: int = 0
) -> list[Array]:
    """Values of many magnitudes and both signs, whose sum depends on the order of adding."""
    generator = np.random.default_rng(seed)
    exponents = generator.uniform(-4, 4, (size, elements))
    return list((generator.standard_normal((size, elements)) * 10.0**exponents).astype(dtype))


def reduce_rough(
    run: Runner,
    name: str,
    elements: int,
    dtype: np.typing.DTypeLike = np.float32,
    operation: str = "allreduce",
) -> dict[int, bytes]:
    """Every rank's result of an all-reduce of ``rough_inputs``, bit by bit."""
    inputs = rough_inputs(run.size, elements, dtype)
    buffers = {rank: inputs[rank].copy() for rank in run.ranks}
    kernel = ReferenceKernel(dtype, size=run.size)
    entry = algorithm(operation, name)
    nodes = node_layouts(run.size)[-1]
    run(
        lambda rank: entry(
            Group.whole(rank, run.size),
            buffers[rank],
            kernel,
            segment_elements=16,
            nodes=nodes,
            reduction=Reduction.SUM,
        )
    )
    return {rank: buffers[rank].tobytes() for rank in run.ranks}


def check_rounded_once(run: Runner, name: str, elements: int) -> None:
    """float16: 2048 + 1 + ... + 1, which rounding at each step would leave at 2048."""
    size = run.size
    buffers = {rank: np.full(elements, 2048 if rank == 0 else 1, np.float16) for rank in run.ranks}
    kernel = ReferenceKernel(np.float16)
    entry = algorithm("allreduce", name)
    run(lambda rank: entry(Group.whole(rank, size), buffers[rank], kernel, segment_elements=4))
    expected = np.float16(2048 + size - 1)
    for rank in run.ranks:
        assert (buffers[rank] == expected).all(), (name, rank, buffers[rank])


def check_reduce_scatter(
    run: Runner, name: str, counts: Sequence[int], *, segment_elements: int = 1 << 18
) -> None:
    """Member i's chunk is summed on i."""
    size = run.size
    offsets = partition.offsets_of(counts)
    places = np.arange(offsets[-1])
    buffers = {rank: (places + rank).astype(np.float64) for rank in run.ranks}
    kernel = ReferenceKernel()
    entry = algorithm("reduce_scatter", name)
    run(
        lambda rank: entry(
            Group.whole(rank, size),
            buffers[rank],
            counts,
            kernel,
            segment_elements=segment_elements,
        )
    )
    for rank in run.ranks:
        mine = slice(offsets[rank], offsets[rank + 1])
        np.testing.assert_array_equal(
            buffers[rank][mine], size * places[mine] + size * (size - 1) // 2
        )


def check_allgather(
    run: Runner, name: str, counts: Sequence[int], *, segment_elements: int = 1 << 18
) -> None:
    """Place i holds i wherever it came from."""
    offsets = partition.offsets_of(counts)
    whole = np.arange(offsets[-1])
    buffers = {rank: np.full(offsets[-1], -1) for rank in run.ranks}
    for rank in run.ranks:
        mine = slice(offsets[rank], offsets[rank + 1])
        buffers[rank][mine] = whole[mine]
    entry = algorithm("allgather", name)
    run(
        lambda rank: entry(
            Group.whole(rank, run.size), buffers[rank], counts, segment_elements=segment_elements
        )
    )
    for rank in run.ranks:
        np.testing.assert_array_equal(buffers[rank], whole)


def check_broadcast(
    run: Runner, name: str, elements: int, root: int, *, segment_elements: int = 1 << 18
) -> None:
    """The root's values, which nobody else has."""
    buffers = {rank: np.arange(elements) + 1000 * rank for rank in run.ranks}
    entry = algorithm("broadcast", name)
    run(
        lambda rank: entry(
            Group.whole(rank, run.size), buffers[rank], root, segment_elements=segment_elements
        )
    )
    for rank in run.ranks:
        np.testing.assert_array_equal(buffers[rank], np.arange(elements) + 1000 * root)


def check_alltoall(run: Runner, name: str, splits: Sequence[Sequence[int]]) -> None:
    """Rank r sends ``splits[r][j]`` elements to j, each of value 100 r + j."""
    size = run.size
    outgoing = {
        rank: [np.full(splits[rank][j], 100 * rank + j) for j in range(size)] for rank in run.ranks
    }
    incoming = {rank: [np.full(splits[j][rank], -1) for j in range(size)] for rank in run.ranks}
    entry = algorithm("alltoall", name)
    run(lambda rank: entry(Group.whole(rank, size), outgoing[rank], incoming[rank]))
    for rank in run.ranks:
        for source in range(size):
            np.testing.assert_array_equal(
                incoming[rank][source], np.full(splits[source][rank], 100 * source + rank)
            )


def check_adasum_of_equals(run: Runner, name: str, elements: int) -> None:
    """Equal gradients give that gradient."""
    gradient = np.arange(1, elements + 1, dtype=np.float64)
    buffers = {rank: gradient.copy() for rank in run.ranks}
    entry = algorithm("adasum", name)
    run(lambda rank: entry(Group.whole(rank, run.size), buffers[rank], ReferenceKernel()))
    for rank in run.ranks:
        np.testing.assert_allclose(buffers[rank], gradient, rtol=1e-12)


def check_adasum_of_orthogonals(run: Runner, name: str) -> None:
    """Rank r's gradient is r + 1 in place r: nothing in common, so they add up."""
    size = run.size
    buffers = {rank: np.zeros(size) for rank in run.ranks}
    for rank in run.ranks:
        buffers[rank][rank] = rank + 1
    entry = algorithm("adasum", name)
    run(lambda rank: entry(Group.whole(rank, size), buffers[rank], ReferenceKernel()))
    for rank in run.ranks:
        np.testing.assert_allclose(buffers[rank], np.arange(1, size + 1), rtol=1e-12)
