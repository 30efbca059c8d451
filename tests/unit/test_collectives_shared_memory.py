"""All-reduce in memory that all ranks have mapped: right values, and every one of its fences is
needed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from horo_lite.collectives import algorithm
from horo_lite.collectives.barrier import dissemination_barrier
from horo_lite.collectives.shared_memory import laid_out_allreduce, lay_out
from horo_lite.interfaces import Array, Group, Schedule
from horo_lite.transport.interleaver import Interleaver
from tests.contracts import collectives as contract
from tests.contracts.reference_kernel import ReferenceKernel

Make = Callable[[int, Array], Schedule]

SEEDS = range(60)


def inputs_of(size: int, elements: int, step: int) -> list[Array]:
    return [np.arange(elements) % 11 + 100.0 * rank + 1000 * step for rank in range(size)]


def without_fence(schedule: Schedule, fence: int, rounds: int) -> Schedule:
    """The schedule with one of its fences left out; a fence is ``rounds`` instructions, and there
    is nothing else."""
    position = 0
    reply = None
    while True:
        try:
            instruction = schedule.send(reply)
        except StopIteration:
            return
        if position // rounds != fence:
            reply = yield instruction
        position += 1


class Steps:
    """Three steps of training: each rank writes a gradient, reduces it, and reads the result.

    The last fence of one step only matters to the next.
    """

    def __init__(self, size: int, elements: int, next_elements: int | None = None) -> None:
        self.size = size
        self.lengths = (elements, elements if next_elements is None else next_elements, elements)
        self.buckets = [np.zeros(elements) for _ in range(size)]
        self.staging = [np.zeros(3 * 4 + 2) for _ in range(size)]
        self.areas = [[np.zeros(max(self.lengths)) for _ in range(size)] for _ in range(2)]
        self.turns = [0] * size
        self.kernel = ReferenceKernel()
        self.right = True

    def resident(self, rank: int, buffer: Array) -> Schedule:
        entry = algorithm("resident_allreduce", "flat")
        return entry(Group.whole(rank, self.size), buffer, self.buckets, self.kernel)

    def hierarchical(self, nodes: tuple[tuple[int, ...], ...]) -> Make:
        def make(rank: int, buffer: Array) -> Schedule:
            (node,) = (ranks for ranks in nodes if rank in ranks)
            peers = [self.buckets[peer] for peer in node]
            entry = algorithm("resident_allreduce", "hierarchical")
            return entry(
                Group.whole(rank, self.size),
                buffer,
                peers,
                self.kernel,
                nodes=nodes,
                segment_elements=2,
            )

        return make

    def shared(self, rank: int, buffer: Array) -> Schedule:
        entry = algorithm("allreduce", "shared")
        return entry(Group.whole(rank, self.size), buffer, self.kernel, staging=self.staging)

    def laid_out(self, rank: int, buffer: Array, whole: bool = False) -> Schedule:
        """With the agreement before it, and no pause after it."""
        group = Group.whole(rank, self.size)
        areas = [area[: len(buffer)] for area in self.areas[self.turns[rank] % len(self.areas)]]
        self.turns[rank] += 1
        lay_out(group, buffer, areas, self.kernel, whole)
        yield from dissemination_barrier(group)
        yield from laid_out_allreduce(group, buffer, buffer, areas, self.kernel, whole)

    def laid_out_whole(self, rank: int, buffer: Array) -> Schedule:
        return self.laid_out(rank, buffer, whole=True)

    def run(self, make: Make, seed: int, fence: int | None = None) -> bool:
        """Whether every rank saw the right sums in every step; ``fence`` is left out."""
        rounds = max(1, (self.size - 1).bit_length())

        def program(rank: int) -> Schedule:
            for step, elements in enumerate(self.lengths):
                inputs = inputs_of(self.size, elements, step)
                buffer = self.buckets[rank][:elements]
                buffer[:] = inputs[rank]
                schedule = make(rank, buffer)
                yield from schedule if fence is None else without_fence(schedule, fence, rounds)
                self.right &= bool((buffer == sum(inputs)).all())

        Interleaver(self.size, seed).run(program)
        return self.right


@pytest.mark.parametrize("size", range(1, 10))
def test_resident_and_shared_sums(size: int) -> None:
    for elements in contract.ELEMENTS:
        for seed in range(2):
            steps = Steps(size, elements)
            assert steps.run(steps.resident, seed)
            steps = Steps(size, min(elements, 64))
            assert steps.run(steps.shared, seed)


@pytest.mark.parametrize("size", range(1, 10))
def test_resident_sums_over_several_nodes(size: int) -> None:
    for nodes in contract.node_layouts(size):
        for elements in (0, 1, 5, 23):
            steps = Steps(size, elements)
            assert steps.run(steps.hierarchical(nodes), seed=elements)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_complete_schedules_are_right_in_any_order(size: int) -> None:
    for seed in SEEDS:
        steps = Steps(size, 23)
        assert steps.run(steps.resident, seed)
        steps = Steps(size, 23, next_elements=14)
        assert steps.run(steps.shared, seed)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("fence", range(3), ids=["ready", "reduced", "read"])
def test_a_resident_bucket_without_one_fence_goes_wrong(fence: int, size: int) -> None:
    def right(seed: int) -> bool:
        steps = Steps(size, 23)
        return steps.run(steps.resident, seed, fence)

    assert not all(right(seed) for seed in SEEDS)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("pieces", [1, 2, 4, 5])
def test_staging_without_any_one_fence_goes_wrong(pieces: int, size: int) -> None:
    # Two ranks take half of the staging area's 14 elements for a piece, others a third.
    areas, fences = (2, pieces + 1) if size == 2 else (3, pieces + 2)
    elements = 14 // areas * pieces
    # The next operation begins with the first area: only if the last piece lay there does the last
    # fence matter.
    needed = fences if pieces % areas == 1 else fences - 1
    for fence in range(needed):

        def right(seed: int) -> bool:
            steps = Steps(size, elements, next_elements=2)
            return steps.run(steps.shared, seed, fence)

        assert not all(right(seed) for seed in SEEDS), f"fence {fence} of {fences}"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("elements", [0, 1, 23])
def test_laid_out_sums_in_any_order(size: int, elements: int) -> None:
    for seed in SEEDS:
        for next_elements in (elements, elements // 2):
            for form in ("laid_out", "laid_out_whole"):
                steps = Steps(size, elements, next_elements)
                assert steps.run(getattr(steps, form), seed)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("form", ["laid_out", "laid_out_whole"])
def test_laid_out_always_in_the_same_areas_goes_wrong(form: str, size: int) -> None:
    """When lengths differ: what one rank lays out then lies where another still reads a result."""

    def right(seed: int) -> bool:
        steps = Steps(size, 23, next_elements=11)
        del steps.areas[1]
        return steps.run(getattr(steps, form), seed)

    assert not all(right(seed) for seed in SEEDS)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("form", "fence"),
    [("laid_out", 0), ("laid_out", 1), ("laid_out_whole", 0)],
    ids=["agreement", "reduced", "agreement of whole"],
)
def test_laid_out_without_one_fence_goes_wrong(form: str, fence: int, size: int) -> None:
    def right(seed: int) -> bool:
        steps = Steps(size, 23, next_elements=14)
        return steps.run(getattr(steps, form), seed, fence)

    assert not all(right(seed) for seed in SEEDS)


@pytest.mark.parametrize("size", range(1, 6))
def test_sixteen_bit_sums_are_rounded_once(size: int) -> None:
    kernel = ReferenceKernel(np.float16)
    for elements in (1, 5, 64):
        buckets = [np.full(elements, 2048 if rank == 0 else 1, np.float16) for rank in range(size)]
        entry = algorithm("resident_allreduce", "flat")
        Interleaver(size, 1).run(
            lambda rank: entry(Group.whole(rank, size), buckets[rank], buckets, kernel)
        )
        ordinary = [np.full(elements, 2048 if rank == 0 else 1, np.float16) for rank in range(size)]
        staging = [np.zeros(12, np.float16) for _ in range(size)]
        shared = algorithm("allreduce", "shared")
        Interleaver(size, 1).run(
            lambda rank: shared(Group.whole(rank, size), ordinary[rank], kernel, staging=staging)
        )
        for buffer in buckets + ordinary:
            assert (buffer == 2048 + size - 1).all()


@pytest.mark.parametrize("size", range(1, 10))
def test_all_ranks_hold_the_same_bits_as_adding_in_rank_order(size: int) -> None:
    inputs = contract.rough_inputs(size, 45)
    kernel = ReferenceKernel(np.float32, size=size)
    expected = np.empty(45, np.float32)
    kernel.combine(expected, inputs, last=True)
    buckets = [gradient.copy() for gradient in inputs]
    entry = algorithm("resident_allreduce", "flat")
    Interleaver(size, 2).run(
        lambda rank: entry(Group.whole(rank, size), buckets[rank], buckets, kernel)
    )
    assert {bucket.tobytes() for bucket in buckets} == {expected.tobytes()}
