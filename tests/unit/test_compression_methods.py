"""What each method promises: unbiased means, convergence with feedback, sizes on the wire, choices."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

from horo_lite.compression import Compression, Frozen, as_compressor, payload_bytes
from horo_lite.compression.sparse import DGC
from horo_lite.interfaces import GatherRequest, Group, Parameter, SumRequest
from tests.contracts.compression import answers, fresh_states, run, true_mean

C = Compression


def normal(size: int, elements: int = 64, seed: int = 0) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [[rng.standard_normal(elements).astype(np.float32)] for _ in range(size)]


# --- unbiased ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compression",
    [C.qsgd, C.qsgd(bits=4), C.qsgd(bits=2), C.qsgd(bits=4, norm="l2"), C.terngrad(clip=None), C.natural,
     C.randomk(0.25)],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 3])
def test_the_mean_is_right_on_average(compression, size):
    """The average of many steps comes nearer to the true mean as one over the root of their number."""
    gradients, steps = normal(size, 256), 150
    states = fresh_states(size, 1)
    means = np.array([run(compression, gradients, states).results[0].mean[0] for _ in range(steps)])
    expected = true_mean(gradients)[0]
    error = np.sqrt(np.mean((means.mean(axis=0) - expected) ** 2))
    standard_error = np.sqrt(np.mean(means.var(axis=0)) / steps)
    assert error <= 1.25 * standard_error  # five standard deviations of it, with 256 elements


def test_a_seed_fixes_every_random_number():
    gradients = normal(3)
    first, again, other = (
        run(C.qsgd(bits=2, seed=seed), gradients).results[0].mean[0] for seed in (1, 1, 2)
    )
    assert first.tobytes() == again.tobytes() != other.tobytes()


def test_ranks_and_steps_draw_different_numbers():
    gradients = [[np.full(64, 0.3, np.float32)] for _ in range(2)]
    gradients[0][0][0] = gradients[1][0][0] = 1
    states = fresh_states(2, 1)
    step = run(C.qsgd(bits=2), gradients, states)
    sent = [result.contributed[0].tobytes() for result in step.results]
    later = run(C.qsgd(bits=2), gradients, states).results[0].contributed[0].tobytes()
    assert len({*sent, later}) == 3


# --- convergence --------------------------------------------------------------------------------------------------


def descend(compression: object, gradient: Callable[[np.ndarray], list[np.ndarray]], start: np.ndarray,
            rate: Callable[[int], float], steps: int) -> np.ndarray:  # fmt: skip
    """Gradient descent through a compressor; ``gradient(x)`` gives one gradient per rank."""
    x = start.astype(np.float64)
    states = None
    for step in range(steps):
        rows = [[g.astype(np.float32)] for g in gradient(x)]
        states = states or fresh_states(len(rows), 1)
        x = x - rate(step) * run(compression, rows, states).results[0].mean[0]
    return x


def test_sign_descent_gets_stuck_without_feedback_and_not_with_it():
    """f(x) = eps |x1 + x2| + |x1 - x2| from (1, 1): every sign step keeps x1 + x2 (Karimireddy et al. 2019, sec. 3)."""

    def subgradient(x: np.ndarray) -> list[np.ndarray]:
        along, across = np.sign(x[0] + x[1]) or 1.0, np.sign(x[0] - x[1]) or 1.0
        return [0.5 * along * np.ones(2) + across * np.array([1.0, -1.0])]

    start = np.array([1.0, 1.0])
    stuck = descend(
        C.sign(feedback=False), subgradient, start, lambda t: 0.1 / math.sqrt(t + 1), 500
    )
    assert stuck.sum() == pytest.approx(2.0)
    solved = descend(C.sign, subgradient, start, lambda t: 0.1 / math.sqrt(t + 1), 500)
    assert np.abs(solved).max() < 0.05


@pytest.mark.parametrize(
    "compression",
    [C.sign, C.onebit, C.topk(0.1), C.with_feedback(C.randomk(0.1)), C.threshold(0.5), C.dgc(0.1, momentum=0.5),
     C.with_feedback(C.fp8), C.with_feedback(C.int8)],
    ids=repr,
)  # fmt: skip
def test_feedback_finds_the_minimum_of_ranks_that_pull_apart(compression):
    """Ranks have minima far from each other's; only their mean, which no rank sees, is the answer."""
    rng = np.random.default_rng(0)
    targets = [rng.standard_normal(40) * 3 for _ in range(3)]
    found = descend(
        compression, lambda x: [x - t for t in targets], np.zeros(40), lambda t: 1 / (t + 10), 250
    )
    assert np.abs(found - np.mean(targets, axis=0)).max() < 0.25


def test_power_iteration_with_a_warm_start_finds_the_leading_directions():
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((30, 2)), rng.standard_normal((2, 20))
    matrix = (left @ right).astype(np.float32)
    parameters, states = [Parameter("weight", matrix.shape)], fresh_states(2, 1)
    rows = [[matrix.reshape(-1) * 0.5], [matrix.reshape(-1) * 1.5]]
    for _ in range(2):
        step = run(C.powersgd(2, feedback=False, min_ratio=1), rows, states, parameters)
    np.testing.assert_allclose(step.results[0].mean[0], matrix.reshape(-1), rtol=1e-3, atol=1e-3)


def test_rank_deficient_matrices_are_reproduced_and_stay_alive():
    parameters, states = [Parameter("weight", (16, 16))], fresh_states(2, 1)
    one = np.outer(np.arange(1, 17), np.ones(16)).astype(np.float32).reshape(-1)
    for _ in range(3):
        step = run(C.powersgd(4, min_ratio=1), [[one], [one]], states, parameters)
        np.testing.assert_allclose(step.results[0].mean[0], one, rtol=1e-4)
    other = np.outer(np.ones(16), np.arange(1, 17)).astype(np.float32).reshape(-1)
    for _ in range(3):
        step = run(C.powersgd(4, min_ratio=1), [[other], [other]], states, parameters)
    np.testing.assert_allclose(step.results[0].mean[0], other, rtol=1e-2)


# --- methods with rules of their own ---------------------------------------------------------------------------------


def test_the_majority_wins_and_a_tie_is_zero():
    rows = [[np.array([1, -5, 1, -1], np.float32)] for _ in range(2)]
    rows += [[np.array([-9, -1, 2, 1], np.float32)]]
    assert run(C.signum(0.0), rows).results[0].mean[0].tolist() == [1, -1, 1, -1]
    assert run(C.signum(0.0), rows[1:]).results[0].mean[0].tolist() == [0, -1, 1, 0]


def test_votes_are_the_same_counted_by_owners():
    gradients = normal(4, 1000)
    expected = np.sign(sum(np.sign(row[0]) for row in gradients))
    step = run(C.signum(0.0), gradients)
    assert step.results[0].mean[0].tolist() == expected.tolist()
    assert [type(request).__name__ for request in step.requests] == [
        "AllToAllRequest",
        "GatherRequest",
    ]


def test_local_momentum_is_what_votes():
    states, up, down = (
        fresh_states(1, 1),
        np.array([[8.0]], np.float32),
        np.array([[-1.0]], np.float32),
    )
    assert run(C.signum(0.9), [up], states).results[0].mean[0].tolist() == [1]
    assert run(C.signum(0.9), [down], states).results[0].mean[0].tolist() == [1]
    assert states[0][0]["velocity"][0] == pytest.approx(0.9 * 0.8 - 0.1)


def test_dgc_corrects_momentum_and_masks_what_was_sent():
    """One rank, half of two elements, momentum 0.5: velocities 1, 1.5, ... add up until they are sent."""
    states = fresh_states(1, 1)
    gradient = [[np.array([4.0, 1.0], np.float32)]]
    method = C.dgc(0.5, momentum=0.5)
    assert run(method, gradient, states).results[0].mean[0].tolist() == [4, 0]
    assert states[0][0]["velocity"].tolist() == [0, 1]
    assert states[0][0]["residual"].tolist() == [0, 1]
    assert run(method, gradient, states).results[0].mean[0].tolist() == [4, 0]
    assert states[0][0]["velocity"].tolist() == [0, 1.5]
    assert states[0][0]["residual"].tolist() == [0, 2.5]
    assert run(method, gradient, states).results[0].mean[0].tolist() == [0, 4.25]
    assert states[0][0]["velocity"].tolist() == [4, 0]


def test_dgc_clips_the_local_gradient():
    rows = [[np.array([30.0, 40.0], np.float32)] for _ in range(4)]
    mean = run(C.dgc(1.0, momentum=0.0, clip_norm=10.0), rows).results[0].mean[0]
    np.testing.assert_allclose(mean, [3.0, 4.0], rtol=1e-6)  # 10 over the root of four ranks


def test_dgc_warms_sparsity_up_exponentially():
    ratios = [DGC(0.001, warmup_steps=4)._ratio(step) for step in range(6)]
    assert ratios[0] == 0.25
    assert ratios[4] == ratios[5] == 0.001
    assert np.diff(np.log(ratios[:5])) == pytest.approx(math.log(0.001 / 0.25) / 4)


def test_warmup_is_uncompressed_for_so_many_steps():
    states, sizes = fresh_states(2, 1), []
    for _ in range(4):
        sizes.append(run(C.warmup(C.int8, 2), normal(2), states).payload_bytes[0])
    assert sizes == [256, 256, 68, 68]


def test_small_gradients_travel_uncompressed():
    rows = [[np.ones(10, np.float32), np.ones(1000, np.float32)] for _ in range(2)]
    step = run(C.min_size(C.fp8, 100), rows)
    assert step.payload_bytes[0] == 40 + 4 + 1000


def test_patterns_choose_the_first_that_matches():
    method = C.per_layer({"a.*": C.int8, "*.weight": C.fp16}, default=C.none)
    parameters = [Parameter(name, (100,)) for name in ("a.weight", "b.weight", "b.bias")]
    rows = [[np.ones(100, np.float32)] * 3 for _ in range(2)]
    assert run(method, rows, parameters=parameters).payload_bytes[0] == 104 + 200 + 400
    with pytest.raises(ValueError, match="named_parameters"):
        run(method, rows)


# --- size on the wire ------------------------------------------------------------------------------------------------


def resnet18_cifar() -> list[Parameter]:
    """The PowerSGD paper's model: torchvision's blocks, a 3x3 stem, ten classes; 11,173,962 parameters."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    inputs = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            shapes += [
                (width, inputs, 3, 3),
                (width,),
                (width,),
                (width, width, 3, 3),
                (width,),
                (width,),
            ]
            if block == 0 and width != 64:
                shapes += [(width, inputs, 1, 1), (width,), (width,)]
            inputs = width
    shapes += [(10, 512), (10,)]
    return [Parameter(f"p{i}", shape) for i, shape in enumerate(shapes)]


@pytest.fixture(scope="module")
def resnet_gradients() -> list[list[np.ndarray]]:
    rng = np.random.default_rng(0)
    return [[rng.standard_normal(math.prod(p.shape)).astype(np.float32) for p in resnet18_cifar()]]


def ratio(
    compression: object, gradients: list[list[np.ndarray]], parameters: Sequence[Parameter]
) -> float:
    """Dense bytes over payload bytes, as the requests of one rank count them."""
    dense = sum(gradient.nbytes for gradient in gradients[0])
    work = (
        as_compressor(compression)
        .bind(parameters)
        .reduce(gradients[0], [{} for _ in parameters], Group.whole(0, 1))
    )
    request, payload = next(work), 0
    if "PowerSGD" in repr(compression):  # the only one of two requests here
        payload += payload_bytes(request)
        request = work.send(request.array)
    return dense / (payload + payload_bytes(request))


@pytest.mark.parametrize("rank, expected", [(1, 243), (2, 136), (4, 72)])
def test_powersgd_sends_what_its_paper_says(resnet_gradients, rank, expected):
    assert sum(map(len, resnet_gradients[0])) == 11_173_962
    assert round(ratio(C.powersgd(rank), resnet_gradients, resnet18_cifar())) == expected


def test_other_methods_send_what_they_should(resnet_gradients):
    parameters = resnet18_cifar()
    assert ratio(C.fp16, resnet_gradients, parameters) == 2
    assert ratio(C.sign, resnet_gradients, parameters) == pytest.approx(32, rel=0.001)
    assert ratio(C.int8, resnet_gradients, parameters) == pytest.approx(4, rel=0.001)
    assert ratio(C.qsgd(bits=2), resnet_gradients, parameters) == pytest.approx(16, rel=0.001)
    assert ratio(C.natural, resnet_gradients, parameters) == pytest.approx(32 / 9, rel=0.001)
    assert ratio(C.topk(0.001), resnet_gradients, parameters) == pytest.approx(500, rel=0.01)
    assert ratio(C.topk(0.01), resnet_gradients, parameters) == pytest.approx(50, rel=0.01)
    assert ratio(C.randomk(0.001), resnet_gradients, parameters) == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize("compression", [C.int8, C.fp8, C.qsgd, C.natural, C.onebit], ids=repr)
def test_two_rounds_send_as_much_as_a_ring_would(compression):
    """Payload of a chunk to each other rank, then the chunk's mean to all others: 2 (N-1)/N, whatever N."""
    gradients = normal(8, 1 << 14)
    step = run(compression, gradients)
    to_owners, to_all = step.requests
    first = sum(p.nbytes for i, p in enumerate(to_owners.payloads) if i != 0)
    second = to_all.payload.nbytes * 7
    whole = sum(p.nbytes for p in to_owners.payloads)
    assert first + second == pytest.approx(2 * 7 / 8 * whole, rel=0.01)


# --- auto ----------------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes on the wire only: the bytes of each request over the link's speed."""

    def __init__(self, bytes_per_s: float) -> None:
        self.now, self.bytes_per_s = 0.0, bytes_per_s

    def __call__(self) -> float:
        return self.now

    def reply(self, requests: Sequence[object]) -> list[object]:
        for request in requests[:1]:
            array = request.array if isinstance(request, SumRequest) else request.payload
            self.now += array.nbytes / self.bytes_per_s
        return answers(requests)


class Slow:
    """Sends a tenth, but takes a second to get there."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __repr__(self) -> str:
        return "slow"

    def reduce(self, gradients, states, group):
        self.clock.now += 1.0
        yield GatherRequest(gradients[0].view(np.uint8)[: gradients[0].nbytes // 10])
        return (yield from as_compressor(C.none).reduce(gradients, states, group))


@pytest.mark.parametrize("bytes_per_s, expected", [(1e3, "Int8"), (1e12, "NoCompression")])
def test_auto_takes_the_fastest_on_this_link(bytes_per_s, expected, caplog):
    clock = Clock(bytes_per_s)
    method = C.auto([C.bf16, C.int8, Slow(clock)], clock=clock, margin=0.05)
    gradients, states = normal(2, 4000), fresh_states(2, 1)
    parameters = [Parameter("weight", (4000,))]
    if expected == "NoCompression":
        clock.bytes_per_s = math.inf
    for _ in range(13):
        step = run(method, gradients, states, parameters, clock.reply)
    assert f"chose {expected}(" in caplog.text
    assert "bucket of weight" in caplog.text
    assert step.payload_bytes[0] == (4004 if expected == "Int8" else 16000)
    assert len(caplog.records) == 1  # one rank says it, once


def test_auto_loses_nothing_that_a_candidate_left_unsent():
    clock = Clock(math.inf)
    gradients, states = normal(2, 100), fresh_states(2, 1)
    total = np.zeros(100)
    for _ in range(8):
        total += run(C.auto([C.topk(0.1)], clock=clock), gradients, states).results[0].mean[0]
    np.testing.assert_allclose(total, 8 * true_mean(gradients)[0], rtol=1e-4, atol=1e-4)


# --- a rank that has joined ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compression",
    [C.randomk(0.5), C.warmup(C.int8, 1), C.sign, C.powersgd(1), C.auto(trials=1)],
    ids=repr,
)
def test_a_joined_rank_gives_zeros_and_keeps_step(compression):
    parameters = [Parameter("weight", (10, 10))]
    states, gradients = fresh_states(2, 1), normal(2, 100)
    run(compression, gradients, states, parameters)
    before = {key: np.copy(value) for key, value in states[1][0].items() if hasattr(value, "dtype")}
    gradients[1] = [np.zeros(100, np.float32)]
    for _ in range(3):
        run(compression, gradients, [states[0], [Frozen(states[1][0])]], parameters)
    counters = [{k: v for k, v in row[0].items() if isinstance(v, int)} for row in states]
    assert counters[0] == counters[1]
    for key, value in before.items():
        np.testing.assert_array_equal(states[1][0][key], value)


def test_groups_of_one_take_the_same_path():
    generator = as_compressor(C.int8).reduce([np.ones(3, np.float32)], [{}], Group.whole(0, 1))
    assert isinstance(next(generator), GatherRequest)


@pytest.mark.parametrize("method", [C.powersgd(1), C.dgc(0.25)])
def test_feedback_around_a_method_that_has_it_is_asked_for_once(method):
    assert repr(C.with_feedback(method)) == repr(as_compressor(method))
    assert repr(C.with_feedback(method.altered(feedback=False))) == repr(as_compressor(method))


def test_powersgd_sends_what_another_method_left_of_a_vector():
    states = [[{"residual": np.float32([1, 2])}], [{}]]
    vector = [[np.float32([3, 0])], [np.float32([1, 0])]]
    parameters = [Parameter("bias", (2,))]
    assert run(C.powersgd(1), vector, states, parameters).results[0].mean[0].tolist() == [2.5, 1]
    assert run(C.powersgd(1), vector, states, parameters).results[0].mean[0].tolist() == [2, 0]


def test_powersgd_keeps_what_it_left_of_a_matrix():
    """A matrix of rank two at every step: one of its ranks comes through, the other the step after."""
    states = [[{}], [{}]]
    gradients = [[np.float32([9, 0, 0, 0] + [0, 1, 0, 0] + [0] * 8)] for _ in range(2)]
    parameters = [Parameter("weight", (4, 4))]
    total = np.zeros(16)
    for step in range(1, 4):
        total += run(C.powersgd(1, min_ratio=1), gradients, states, parameters).results[0].mean[0]
        left = (states[0][0]["residual"] + states[1][0]["residual"]) / 2
        np.testing.assert_allclose(total + left, step * gradients[0][0], atol=1e-5)
        assert np.linalg.matrix_rank(total.reshape(4, 4), tol=1e-4) == min(step, 2)


@pytest.mark.parametrize("wrong", [-3, 0.1, "5", None, float("inf")])
@pytest.mark.parametrize(
    "make", [partial(C.warmup, C.int8), partial(C.min_size, C.int8), partial(C.dgc, 0.01, 0.9, None)]
)
def test_counts_are_whole_numbers(make, wrong):
    """A share of training in place of steps would be a single step."""
    with pytest.raises(ValueError, match=rf" is {re.escape(repr(wrong))}; expected a whole number, 0 or more, as in "):
        make(wrong)
    assert make(5) and make(1e4) and make(np.int64(0))


def test_auto_takes_a_single_candidate():
    assert repr(C.auto(C.int8)) == repr(C.auto([C.int8])) == "auto(NoCompression(), Int8(), trials=3)"
