"""The contract of every compressor, as bodies that any runner of N ranks can call.

``answers`` carries out one round of requests exactly; ``run`` steps N generators together in one process. Under mpirun
the same checks run on what a real engine returns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from horo_lite.compression import as_compressor, payload_bytes
from horo_lite.interfaces import (
    AllToAllRequest,
    CompressorRequest,
    GatherRequest,
    Group,
    Parameter,
    Reduced,
    SumRequest,
)

State = MutableMapping[str, Any]


class Step(NamedTuple):
    """One bucket exchanged by all ranks."""

    results: list[Reduced]
    payload_bytes: list[int]
    """What each rank's requests put up for sending."""
    requests: list[CompressorRequest]
    """Rank 0's."""


class Halve:
    """Horovod's way: the mean of what was compressed is decompressed."""

    @staticmethod
    def compress(tensor):
        return (tensor / 2).astype(np.float16), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.astype(ctx) * 2


def is_tensor(array: Any) -> bool:
    return not isinstance(array, np.ndarray)


def host(array: Any) -> np.ndarray:
    """A flat array as numpy, float64 where it is a float."""
    if is_tensor(array):
        array = array.detach().cpu()
        array = (array.double() if array.dtype.is_floating_point else array).numpy()
    return array.astype(np.float64) if array.dtype.kind in "fV" else array


def answers(requests: Sequence[CompressorRequest]) -> list[Any]:
    """Each rank's reply; ranks that ask for different things are an error of the compressor."""
    kinds = {type(request) for request in requests}
    assert len(kinds) == 1, f"ranks made different requests: {kinds}"
    size = len(requests)
    if kinds == {SumRequest}:
        assert len({request.scale for request in requests}) == 1
        assert len({len(request.array) for request in requests}) == 1
        return [_scaled_sum(requests) for _ in range(size)]
    if kinds == {GatherRequest}:
        payloads = [request.payload for request in requests]
        return [_received(payloads) for _ in range(size)]
    assert kinds == {AllToAllRequest}
    assert all(len(request.payloads) == size for request in requests)
    return [_received([request.payloads[rank] for request in requests]) for rank in range(size)]


def _received(payloads: Sequence[Any]) -> list[Any]:
    """Copies as they come out of one receive buffer, at any byte."""
    if is_tensor(payloads[0]):
        import torch

        padded = torch.cat([payloads[0].new_zeros(1), *payloads])
    else:
        padded = np.concatenate([np.zeros(1, np.uint8), *payloads])
    ends = np.cumsum([1, *map(len, payloads)])
    return [padded[start:end] for start, end in itertools.pairwise(ends)]


def _copied(array: Any) -> Any:
    return array.clone() if is_tensor(array) else array.copy()


def _scaled_sum(requests: Sequence[SumRequest]) -> Any:
    """The sum in float64 for exactness, scaled and rounded once to the arrays' type."""
    first = requests[0].array
    with np.errstate(all="ignore"):
        if is_tensor(first):
            total = sum(request.array.double() for request in requests) * requests[0].scale
            return total.to(first.dtype)
        if first.dtype.kind in "iu":
            total = sum(request.array.astype(np.int64) for request in requests)
            return np.trunc(total * requests[0].scale).astype(first.dtype)
        if first.dtype.kind == "c":
            return (sum(r.array for r in requests) * requests[0].scale).astype(first.dtype)
        total = sum(request.array.astype(np.float64) for request in requests) * requests[0].scale
        return total.astype(np.float32 if first.dtype.itemsize < 4 else first.dtype).astype(
            first.dtype
        )


def run(
    compression: Any,
    gradients: Sequence[Sequence[Any]],
    states: Sequence[Sequence[State]] | None = None,
    parameters: Sequence[Parameter] | None = None,
    reply: Callable[[Sequence[CompressorRequest]], list[Any]] = answers,
) -> Step:
    """Exchange one bucket.

    Args:
        gradients: ``gradients[rank]`` is the list of that rank's flat arrays.
        states: ``states[rank][i]`` is kept from call to call; empty ones when None.
        parameters: what the compressor is bound to; not bound when None.
    """
    size = len(gradients)
    states = states or fresh_states(size, len(gradients[0]))
    compressors = [as_compressor(compression) for _ in range(size)]
    if parameters is not None:
        compressors = [compressor.bind(parameters) for compressor in compressors]
    before = [[_copied(array) for array in row] for row in gradients]
    generators = [
        compressor.reduce(row, row_states, Group.whole(rank, size))
        for rank, (compressor, row, row_states) in enumerate(
            zip(compressors, gradients, states, strict=True)
        )
    ]
    sent, first_rank, results = [0] * size, [], []
    replies: list[Any] = [None] * size
    while True:
        requests, results = [], []
        for generator, answer in zip(generators, replies, strict=True):
            try:
                requests.append(generator.send(answer))
            except StopIteration as end:
                results.append(end.value)
        assert not (requests and results), "ranks made different numbers of requests"
        if results:
            break
        first_rank.append(requests[0])
        sent = [
            total + payload_bytes(request) for total, request in zip(sent, requests, strict=True)
        ]
        replies = reply(requests)
    for row, old in zip(gradients, before, strict=True):
        for array, copy in zip(row, old, strict=True):
            assert np.array_equal(host(array), host(copy), equal_nan=True), (
                "a gradient was written to"
            )
    check_form(results, gradients)
    return Step(results, sent, first_rank)


def fresh_states(size: int, count: int) -> list[list[State]]:
    return [[{} for _ in range(count)] for _ in range(size)]


def check_form(results: Sequence[Reduced], gradients: Sequence[Sequence[Any]]) -> None:
    """One flat array per gradient, of its type and size, and the same bits of the mean on every rank."""
    for result, row in zip(results, gradients, strict=True):
        assert len(result.mean) == len(row) == len(result.contributed)
        for mean, sent, gradient in zip(result.mean, result.contributed, row, strict=True):
            assert mean.shape == gradient.shape == sent.shape
            assert mean.dtype == gradient.dtype
    for result in results[1:]:
        for mine, first in zip(result.mean, results[0].mean, strict=True):
            assert bits(mine) == bits(first), "ranks hold different means"


def bits(array: Any) -> bytes:
    return (
        array.numpy().tobytes()
        if is_tensor(array) and array.dtype.itemsize > 2
        else (host(array).tobytes() if is_tensor(array) else array.tobytes())
    )


def true_mean(gradients: Sequence[Sequence[Any]]) -> list[np.ndarray]:
    """The mean over ranks of each gradient, in float64."""
    return [np.mean([host(row[i]) for row in gradients], axis=0) for i in range(len(gradients[0]))]


def residuals(
    states: Sequence[Sequence[State]], gradients: Sequence[Sequence[Any]]
) -> list[np.ndarray]:
    """mean(residual) of each gradient, with what the owners of chunks hold back beside it."""
    size, out = len(states), []
    for index, like in enumerate(gradients[0]):
        total = np.zeros(len(like))
        for row in states:
            state = row[index]
            if "residual" in state:
                total += host(state["residual"]) / size
            if "server_residual" in state:
                start = int(state["server_start"])
                part = host(state["server_residual"])
                total[start : start + len(part)] += part
        out.append(total)
    return out


def check_conserves(
    compression: Any,
    steps: Sequence[Sequence[Sequence[Any]]],
    parameters: Sequence[Parameter] | None = None,
    tolerance: float = 1e-5,
) -> None:
    """With feedback nothing is lost: mean + mean(residual) is the true mean plus the old mean(residual)."""
    states = fresh_states(len(steps[0]), len(steps[0][0]))
    for gradients in steps:
        before = residuals(states, gradients)
        step = run(compression, gradients, states, parameters)
        after = residuals(states, gradients)
        for index, expected in enumerate(true_mean(gradients)):
            got = host(step.results[0].mean[index]) + after[index] - before[index]
            scale = max(np.abs(host(row[index])).max(initial=0) for row in gradients)
            np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * max(scale, 1e-30))


def check_zeros(compression: Any, zeros: Sequence[Sequence[Any]], parameters: Any = None) -> None:
    """Zeros in, zeros out, at the second step too."""
    states = fresh_states(len(zeros), len(zeros[0]))
    for _ in range(2):
        for mean in run(compression, zeros, states, parameters).results[0].mean:
            assert not host(mean).any()


def check_finite(
    compression: Any, gradients: Sequence[Sequence[Any]], parameters: Any = None
) -> Step:
    """Finite in, finite out, in means and in states, for two steps."""
    states = fresh_states(len(gradients), len(gradients[0]))
    for _ in range(2):
        step = run(compression, gradients, states, parameters)
        for result in step.results:
            assert all(np.isfinite(host(mean)).all() for mean in result.mean)
    assert_states_finite(states)
    return step


def assert_states_finite(states: Sequence[Sequence[State]]) -> None:
    for row in states:
        for state in row:
            for key, value in state.items():
                assert np.isfinite(host(value) if hasattr(value, "dtype") else value).all(), key


def check_non_finite(
    compression: Any,
    clean: Sequence[Sequence[Any]],
    bad: Sequence[Sequence[Any]],
    parameters: Any = None,
    whole: bool = True,
) -> None:
    """A rank's NaN or infinity reaches every rank's mean, leaves states as they were, and is forgotten after that.

    Args:
        whole: the bucket is one unit; else only the states of the gradients that are hit stay as they were.
    """
    states = fresh_states(len(clean), len(clean[0]))
    run(compression, clean, states, parameters)
    before = [[_arrays(state) for state in row] for row in states]
    step = run(compression, bad, states, parameters)
    for result in step.results:
        assert any(not np.isfinite(host(mean)).all() for mean in result.mean)
    for row, old_row in zip(states, before, strict=True):
        for state, old, mean in zip(row, old_row, step.results[0].mean, strict=True):
            now = _arrays(state)
            assert now.keys() == old.keys()
            for key in old if whole or not np.isfinite(host(mean)).all() else ():
                np.testing.assert_array_equal(now[key], old[key], err_msg=key)
    assert_states_finite(states)
    step = run(compression, clean, states, parameters)
    assert all(np.isfinite(host(mean)).all() for mean in step.results[0].mean)


def _arrays(state: State) -> dict[str, np.ndarray]:
    """What a state remembers of gradients; how long a candidate took (``auto``) is none of it."""
    return {
        key: host(_copied(value))
        for key, value in state.items()
        if hasattr(value, "dtype") and key != "auto_times"
    }
