"""Adasum against its formula."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from horo_lite.collectives import algorithm
from horo_lite.interfaces import Group
from tests.contracts import collectives as contract
from tests.contracts.reference_kernel import ReferenceKernel
from tests.contracts.runners import InterleavedRunner, SimulatedRunner


def adasum_of_two(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dot, a_norm, b_norm = a @ b, a @ a, b @ b
    a_factor = 1 - dot / (2 * a_norm) if a_norm else 1.0
    b_factor = 1 - dot / (2 * b_norm) if b_norm else 1.0
    return a_factor * a + b_factor * b


def adasum(gradients: list[np.ndarray]) -> np.ndarray:
    """Neighbours first; of 2^k + r the first 2r are paired beforehand."""
    core = 1 << (len(gradients).bit_length() - 1)
    extra = len(gradients) - core
    vectors = [adasum_of_two(*gradients[2 * i : 2 * i + 2]) for i in range(extra)] + gradients[
        2 * extra :
    ]
    while len(vectors) > 1:
        vectors = [adasum_of_two(*vectors[i : i + 2]) for i in range(0, len(vectors), 2)]
    return vectors[0]


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("elements", [1, 2, 3, 5, 7, 64])
def test_adasum_is_its_formula_tensor_by_tensor(size: int, elements: int) -> None:
    for boundaries in (
        (),
        (0, elements),
        (0, elements // 2, elements),
        (0, 0, 1, elements // 2, elements),
    ):
        if list(boundaries) != sorted(boundaries):
            continue
        gradients = contract.rough_inputs(size, elements, np.float64)
        bounds = boundaries or (0, elements)
        spans = [slice(*pair) for pair in itertools.pairwise(bounds)]
        expected = np.concatenate(
            [adasum([gradient[span] for gradient in gradients]) for span in spans]
        )
        for run in (SimulatedRunner(size), InterleavedRunner(size, elements)):
            buffers = [gradient.copy() for gradient in gradients]
            kernel = ReferenceKernel()
            entry = algorithm("adasum", "halving_doubling")
            run(
                lambda rank: entry(
                    Group.whole(rank, size), buffers[rank], kernel, boundaries=boundaries
                )
            )
            for buffer in buffers:
                np.testing.assert_allclose(buffer, expected, rtol=1e-9)
                assert buffer.tobytes() == buffers[0].tobytes()


@pytest.mark.parametrize("size", range(1, 10))
def test_equal_gradients_stay_and_orthogonal_ones_add_up(size: int) -> None:
    run = SimulatedRunner(size)
    contract.check_adasum_of_equals(run, "halving_doubling", 5)
    contract.check_adasum_of_orthogonals(run, "halving_doubling")


def test_by_hand() -> None:
    """a = [1, 0], b = [1, 1]: a.b = 1, |a|^2 = 1, |b|^2 = 2; so a / 2 + 3 b / 4 = [1.25, 0.75]."""
    buffers = [np.array([1.0, 0.0]), np.array([1.0, 1.0])]
    entry = algorithm("adasum", "halving_doubling")
    SimulatedRunner(2)(lambda rank: entry(Group.whole(rank, 2), buffers[rank], ReferenceKernel()))
    for buffer in buffers:
        np.testing.assert_array_equal(buffer, [1.25, 0.75])


def test_a_zero_gradient_leaves_the_other_as_it_is() -> None:
    buffers = [np.zeros(3), np.array([1.0, 2.0, 3.0])]
    entry = algorithm("adasum", "halving_doubling")
    SimulatedRunner(2)(lambda rank: entry(Group.whole(rank, 2), buffers[rank], ReferenceKernel()))
    np.testing.assert_array_equal(buffers[0], [1.0, 2.0, 3.0])
