"""Every method against the contract of compressors, with 1, 2, 3 and 4 ranks in one process."""

from __future__ import annotations

import numpy as np
import pytest

from horo_lite.compression import RANK_OWN, STATE_KEYS, Compression, backend
from horo_lite.compression.torch_backend import TorchBackend
from horo_lite.interfaces import Parameter
from tests.contracts import compression as contract

C = Compression
METHODS = {
    "none": C.none,
    "fp16": C.fp16,
    "bf16": C.bf16,
    "fp8": C.fp8,
    "int8": C.int8,
    "qsgd8": C.qsgd,
    "qsgd4": C.qsgd(bits=4),
    "qsgd2": C.qsgd(bits=2),
    "qsgd l2": C.qsgd(bits=4, norm="l2"),
    "terngrad": C.terngrad,
    "natural": C.natural,
    "sign": C.sign,
    "signum": C.signum,
    "onebit": C.onebit,
    "topk": C.topk(0.1),
    "topk16": C.topk(0.1, value_type="bfloat16"),
    "randomk": C.randomk(0.1),
    "threshold": C.threshold(0.5),
    "dgc": C.dgc(0.1, clip_norm=1.0, warmup_steps=2),
    "powersgd": C.powersgd(2),
    "fp16 with feedback": C.with_feedback(C.fp16),
    "bf16 with feedback": C.with_feedback(C.bf16),
    "fp8 with feedback": C.with_feedback(C.fp8),
    "int8 with feedback": C.with_feedback(C.int8),
    "natural with feedback": C.with_feedback(C.natural),
    "randomk with feedback": C.with_feedback(C.randomk(0.1)),
    "min_size": C.min_size(C.powersgd(2), 100),
    "per_layer": C.per_layer({"*.weight": C.topk(0.1), "gain": C.int8}, default=C.sign),
    "warmup": C.warmup(C.sign, 1),
    "auto": C.auto([C.topk(0.1), C.sign], trials=1),
}
WITH_FEEDBACK = [
    "sign",
    "onebit",
    "topk",
    "topk16",
    "threshold",
    "powersgd",
    "fp8 with feedback",
    "int8 with feedback",
    "natural with feedback",
    "randomk with feedback",
    "min_size",
    "warmup",
    "auto",
]
IN_PARTS = {"min_size", "per_layer"}  # several exchanges, each a unit of its own
STOCHASTIC = {"qsgd8", "qsgd4", "qsgd2", "qsgd l2", "terngrad", "natural", "natural with feedback"}
STOCHASTIC |= {"powersgd", "min_size"}  # by their first right factor
SATURATES = {
    "fp16",
    "fp16 with feedback",
}  # beyond float16's range the mean is infinite, as documented

OVERFLOW = SATURATES | {"powersgd", "min_size", "randomk"}  # products, and division by the ratio

PARAMETERS = [
    Parameter("layer.weight", (12, 11)),
    Parameter("layer.bias", (11,)),
    Parameter("gain", ()),
    Parameter("conv.weight", (8, 3, 3, 3)),
    Parameter("empty", (0, 4)),
]

SIZES = [int(np.prod(parameter.shape)) for parameter in PARAMETERS]
RANKS = (1, 2, 3, 4)

every_method = pytest.mark.parametrize("name", METHODS)


def normal(size: int, seed: int = 0, dtype: object = np.float32) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [[rng.standard_normal(n).astype(dtype) for n in SIZES] for _ in range(size)]


def zeros(size: int) -> list[list[np.ndarray]]:
    return [[np.zeros(n, np.float32) for n in SIZES] for _ in range(size)]


@every_method
@pytest.mark.parametrize("size", RANKS)
def test_every_rank_holds_the_same_finite_mean(name, size):
    """The runner compares the bits; here twice, so that states are in use."""
    step = contract.check_finite(METHODS[name], normal(size), PARAMETERS)
    for mean, expected in zip(step.results[0].mean, contract.true_mean(normal(size)), strict=True):
        assert np.abs(contract.host(mean)).max(initial=0) <= 40 * np.abs(expected).max(initial=1)


@every_method
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_every_float_type_keeps_its_type(name, dtype):
    pytest.importorskip("ml_dtypes")
    contract.check_finite(METHODS[name], normal(3, dtype=np.dtype(dtype)), PARAMETERS)


@every_method
def test_integers_and_empty_buckets_travel_as_they_are(name):
    weight = [Parameter("weight", (3,))]
    integers = [[np.array([1, -5, 7])], [np.array([2, -6, 9])]]
    step = contract.run(METHODS[name], integers, parameters=weight)
    assert step.results[0].mean[0].tolist() == [1, -5, 8]
    contract.run(METHODS[name], [[], []], parameters=[])
    empty = [Parameter("weight", (0, 4))]
    contract.run(METHODS[name], [[np.zeros(0, np.float32)]] * 2, parameters=empty)


@pytest.mark.parametrize("name", WITH_FEEDBACK)
@pytest.mark.parametrize("size", RANKS)
def test_what_feedback_keeps_is_exactly_what_was_not_sent(name, size):
    contract.check_conserves(METHODS[name], [normal(size, seed) for seed in range(3)], PARAMETERS)


@pytest.mark.parametrize("name, tolerance", [("fp16", 2**-10), ("bf16", 2**-7)])
def test_feedback_around_a_cast_misses_only_the_rounding_of_the_mean(name, tolerance):
    steps = [normal(3, seed) for seed in range(3)]
    contract.check_conserves(METHODS[f"{name} with feedback"], steps, PARAMETERS, tolerance)


@every_method
def test_zeros_stay_zeros(name):
    for size in RANKS:
        contract.check_zeros(METHODS[name], zeros(size), PARAMETERS)


@every_method
def test_a_gradient_of_zeros_is_not_the_end(name):
    """A warm start or a residual of zeros must not swallow what comes later."""
    states = contract.fresh_states(2, len(SIZES))
    contract.run(METHODS[name], zeros(2), states, PARAMETERS)
    mean = contract.run(METHODS[name], normal(2), states, PARAMETERS).results[0].mean
    assert np.concatenate(mean).any()


@every_method
@pytest.mark.parametrize("value", [1.5, -2.0, 0.0])
def test_one_element_and_scalars_survive(name, value):
    for size in RANKS:
        gradients = [[np.array([value], np.float32)] for _ in range(size)]
        step = contract.check_finite(METHODS[name], gradients, [Parameter("scalar", ())])
        assert np.sign(step.results[0].mean[0][0]) in (np.sign(value), 0)


@every_method
@pytest.mark.parametrize("magnitude", [1e37, 1e30, 1e-30, 1e-40, 1e-45])
def test_huge_and_subnormal_values_give_finite_means(name, magnitude):
    """At 1e37 the sum of a gradient's magnitudes is beyond float32, and that of its squares by far."""
    if magnitude > 1 and name in (OVERFLOW if magnitude > 1e30 else SATURATES):
        return
    for size in (1, 3):
        gradients = [[(g * magnitude).astype(np.float32) for g in row] for row in normal(size)]
        contract.check_finite(METHODS[name], gradients, PARAMETERS)


@every_method
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_value_reaches_every_rank_and_no_state(name, bad):
    for size, where in ((1, 0), (2, 131), (3, 143), (4, 200)):
        clean, poisoned = normal(size), normal(size, 1)
        flat = np.concatenate(poisoned[size - 1])
        flat[where] = bad
        poisoned[size - 1] = np.split(flat, np.cumsum(SIZES)[:-1])
        contract.check_non_finite(METHODS[name], clean, poisoned, PARAMETERS, name not in IN_PARTS)


@every_method
def test_a_parameter_that_changed_its_size_starts_afresh(name):
    states = contract.fresh_states(2, 1)
    for elements in (100, 60, 100):
        gradients = [[np.ones(elements, np.float32)], [np.full(elements, 2, np.float32)]]
        contract.run(METHODS[name], gradients, states, [Parameter("weight", (elements // 10, 10))])


@pytest.fixture(params=["host", "device"])
def tensors(request, monkeypatch):
    """Tensors in host memory, by the code for them and by the code for those of any device."""
    torch = pytest.importorskip("torch")
    if request.param == "device":
        monkeypatch.setattr(backend, "_torch_backend", TorchBackend)
    return lambda rows: [[torch.from_numpy(g) for g in row] for row in rows]


@every_method
def test_torch_tensors_take_the_same_path(name, tensors):
    torch = pytest.importorskip("torch")
    for size in (1, 3):
        step = contract.check_finite(METHODS[name], tensors(normal(size)), PARAMETERS)
        assert all(isinstance(mean, torch.Tensor) for mean in step.results[0].mean)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in STOCHASTIC])
def test_torch_and_numpy_agree(name, tensors):
    ours, theirs = contract.fresh_states(3, len(SIZES)), contract.fresh_states(3, len(SIZES))
    for seed in range(2):
        gradients = normal(3, seed)
        mean = contract.run(METHODS[name], gradients, ours, PARAMETERS).results[0].mean
        other = contract.run(METHODS[name], tensors(gradients), theirs, PARAMETERS).results[0].mean
        for a, b in zip(mean, other, strict=True):
            np.testing.assert_allclose(a, b.numpy(), rtol=1e-5, atol=1e-5)


@every_method
def test_every_key_of_a_state_is_known(name):
    """Adapters tell a compressor's entries of an optimizer's state from the optimizer's own by their keys."""
    states = contract.fresh_states(2, len(SIZES))
    for _ in range(2):
        contract.run(METHODS[name], normal(2), states, PARAMETERS)
    used = {key for row in states for state in row for key in state}
    assert used <= STATE_KEYS
    rank_own = {key for key in used if any(a.get(key) is not b.get(key) for a, b in zip(*states, strict=True))}
    for mine, other in zip(*states, strict=True):
        for key in (rank_own & mine.keys()) - RANK_OWN:
            np.testing.assert_array_equal(mine[key], other[key])
