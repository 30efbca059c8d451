"""Every method against the contract of compressors, with 1, 2, 3 and 4 ranks in one process."""

from __future__ import annotations

import numpy as np
import pytest

from horo_lite.compression import Compression
from horo_lite.interfaces import Parameter
from tests.contracts import compression as contract

METHODS = {
    "none": Compression.none,
    "fp16": Compression.fp16,
    "bf16": Compression.bf16,
    "sign": Compression.sign,
    "topk": Compression.topk(0.1),
}
WITH_FEEDBACK = ["sign", "topk"]
ROUNDED = {"fp16": 2**-10, "bf16": 2**-7}  # casts round the mean once more

PARAMETERS = [
    Parameter("layer.weight", (12, 11)),
    Parameter("layer.bias", (11,)),
    Parameter("gain", ()),
    Parameter("conv.weight", (8, 3, 3, 3)),
    Parameter("empty", (0, 4)),
]
SIZES = [int(np.prod(parameter.shape)) for parameter in PARAMETERS]

every_method = pytest.mark.parametrize("name", METHODS)
every_size = pytest.mark.parametrize("size", [1, 2, 3, 4])


def normal(
    size: int, seed: int = 0, dtype: object = np.float32, sizes: list[int] = SIZES
) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [[rng.standard_normal(n).astype(dtype) for n in sizes] for _ in range(size)]


@every_method
@every_size
def test_every_rank_holds_the_same_mean_near_the_true_one(name, size):
    gradients = normal(size)
    step = contract.run(METHODS[name], gradients, parameters=PARAMETERS)
    for mean, expected in zip(step.results[0].mean, contract.true_mean(gradients), strict=True):
        assert np.isfinite(contract.host(mean)).all()
        assert np.abs(contract.host(mean)).max(initial=0) <= 40 * np.abs(expected).max(initial=1)


@every_method
@every_size
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_every_float_type_keeps_its_type(name, size, dtype):
    contract.run(METHODS[name], normal(size, dtype=_dtype(dtype)), parameters=PARAMETERS)


@every_method
def test_integers_and_empty_buckets_travel_as_they_are(name):
    integers = [[np.array([1, -5, 7])], [np.array([2, -6, 9])]]
    assert contract.run(METHODS[name], integers).results[0].mean[0].tolist() == [1, -5, 8]
    contract.run(METHODS[name], [[], []])
    contract.run(METHODS[name], [[np.zeros(0, np.float32)]] * 2)


@pytest.mark.parametrize("name", WITH_FEEDBACK)
@every_size
def test_what_feedback_keeps_is_exactly_what_was_not_sent(name, size):
    contract.check_conserves(METHODS[name], [normal(size, seed) for seed in range(3)], PARAMETERS)


@every_method
@every_size
def test_zeros_stay_zeros(name, size):
    zeros = [[np.zeros(n, np.float32) for n in SIZES] for _ in range(size)]
    contract.check_zeros(METHODS[name], zeros, PARAMETERS)


@every_method
@every_size
@pytest.mark.parametrize("value", [1.5, -2.0, 0.0])
def test_one_element_and_scalars_survive(name, size, value):
    gradients = [[np.array([value], np.float32)] for _ in range(size)]
    step = contract.check_finite(METHODS[name], gradients, [Parameter("scalar", ())])
    assert np.sign(step.results[0].mean[0][0]) in (np.sign(value), 0)


@every_method
@every_size
@pytest.mark.parametrize("magnitude", [1e30, 1e-30, 1e-40])
def test_huge_and_subnormal_values_give_finite_means(name, size, magnitude):
    if name == "fp16" and magnitude > 1:
        pytest.skip("beyond float16's range the mean is infinite, as documented")
    gradients = [[(g * magnitude).astype(np.float32) for g in row] for row in normal(size)]
    contract.check_finite(METHODS[name], gradients, PARAMETERS)


@every_method
@every_size
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 131, 143])
def test_one_bad_value_reaches_every_rank_and_no_state(name, size, bad, where):
    clean, poisoned = normal(size), normal(size, 1)
    flat = np.concatenate(poisoned[size - 1])
    flat[where] = bad
    poisoned[size - 1] = np.split(flat, np.cumsum(SIZES)[:-1])
    contract.check_non_finite(METHODS[name], clean, poisoned, PARAMETERS)


@every_method
def test_a_parameter_that_changed_its_size_starts_afresh(name):
    states = contract.fresh_states(2, 1)
    for elements in (100, 60, 100):
        contract.run(METHODS[name], normal(2, elements, sizes=[elements]), states)


@every_method
@every_size
def test_torch_tensors_take_the_same_path(name, size):
    torch = pytest.importorskip("torch")
    gradients = [[torch.from_numpy(g) for g in row] for row in normal(size)]
    states = contract.fresh_states(size, len(SIZES))
    for _ in range(2):
        step = contract.run(METHODS[name], gradients, states, PARAMETERS)
    assert all(isinstance(mean, torch.Tensor) for mean in step.results[0].mean)


def _dtype(name: str) -> object:
    if name == "bfloat16":
        return pytest.importorskip("ml_dtypes").bfloat16
    return np.dtype(name)
