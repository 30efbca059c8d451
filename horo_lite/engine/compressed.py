"""Runs a compressor: answers its requests with collectives, as one schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from horo_lite.arrays import device_name, is_torch, type_name
from horo_lite.compression import Cast
from horo_lite.errors import ArgumentError, ArgumentTypeError
from horo_lite.interfaces import (
    AllToAllRequest,
    Array,
    Compressor,
    GatherRequest,
    Reduced,
    Reduction,
    SumRequest,
)

if TYPE_CHECKING:
    from horo_lite.engine.fabric import Fabric


def compressed(
    compressor: Compressor,
    gradients: Sequence[Array],
    states: Sequence[MutableMapping[str, Any]],
    fabric: Fabric,
) -> Generator[Any, Any, Reduced]:
    """Exchange one bucket's gradients through a compressor (``interfaces.Compressor``)."""
    work = compressor.reduce(gradients, states, fabric.group)
    if not isinstance(work, Generator):
        raise ArgumentTypeError(
            f"{compressor!r}: reduce() returned {type(work).__name__}; expected a generator, which yields requests: "
            "mean = yield SumRequest(array, 1 / group.size)"
        )
    stats = fabric.stats
    reply: Any = None
    encoding = True
    while True:
        started = time.perf_counter()
        try:
            request = work.send(reply)
        except StopIteration as stop:
            stats.decode_s += time.perf_counter() - started
            return _checked(stop.value, gradients, compressor)
        asked = time.perf_counter()
        if encoding:
            stats.encode_s += asked - started
        else:
            stats.decode_s += asked - started
        encoding = False
        if type(request) not in _ANSWERS:
            raise ArgumentTypeError(
                f"{compressor!r}: reduce() yielded {type(request).__name__}; expected one of "
                f"{', '.join(kind.__name__ for kind in _ANSWERS)}"
            )
        arrays = request.payloads if isinstance(request, AllToAllRequest) else request[:1]
        if any(getattr(array, "ndim", None) != 1 for array in arrays):
            raise ArgumentTypeError(
                f"{compressor!r}: reduce() yielded {type(request).__name__} of "
                f"{', '.join(map(_described, arrays))}; expected flat arrays: array.reshape(-1)"
            )
        if isinstance(request, AllToAllRequest) and len(arrays) != fabric.group.size:
            raise ArgumentError(
                f"{compressor!r}: reduce() yielded AllToAllRequest of {len(arrays)} payloads; expected one for each of "
                f"{fabric.group.size} ranks"
            )
        reply = yield from _ANSWERS[type(request)](request, fabric)
        stats.wire_s += time.perf_counter() - asked


def check_reduces(compressor: Compressor | None, reduction: Reduction) -> None:
    """Raise where a compressor, all of which give the mean, cannot give this reduction.

    Raises:
        ArgumentError: names both.
    """
    if compressor is not None and not isinstance(compressor, Cast) and reduction not in _FROM_MEAN:
        raise ArgumentError(
            f"{reduction.name.capitalize()} through {compressor!r} is not possible: it gives Average and Sum. The "
            "casts, fp16 and bf16, give every reduction"
        )


def cast_reduced(
    buffer: Array,
    cast: Cast,
    fabric: Fabric,
    reduction: Reduction,
    postscale: float = 1.0,
    boundaries: Sequence[int] | None = None,
) -> Generator[Any, Any, None]:
    """Reduce a flat array in place by any reduction, as 16-bit floats.

    A sum is halved on the way until it cannot be beyond what one input can be, which no exact sum shows.

    Args:
        boundaries: for Adasum, where several tensors begin (and end).
    """
    narrow = cast.narrow(buffer)
    fabric.stats.payload_bytes += narrow.nbytes
    device = device_name(narrow)
    scale = 0.5 ** (fabric.size - 1).bit_length() if reduction is Reduction.SUM else 1.0
    if boundaries is None:
        schedule, _ = fabric.allreduce(
            narrow, cast.wire_type, reduction, postscale=scale, device=device, staged=False
        )
    else:
        schedule = fabric.adasum(narrow, cast.wire_type, boundaries, device=device)
    yield from schedule
    buffer[:] = narrow
    if postscale != scale:
        buffer *= postscale / scale


def _checked(result: Any, gradients: Sequence[Array], compressor: Compressor) -> Reduced:
    """What a compressor has returned, if it fits: a mean of another length would be spread over the gradient."""
    try:
        mean, contributed = result
        lengths = [len(array) for array in mean]
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"{compressor!r}: reduce() ended with {type(result).__name__}; expected Reduced(mean, contributed), each a "
            "list of one flat array per gradient"
        ) from None
    wanted = [len(gradient) for gradient in gradients]
    if lengths != wanted:
        raise ArgumentError(f"{compressor!r}: the means have {lengths} elements; expected {wanted}, as the gradients")
    return Reduced(mean, contributed)


def _described(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__


def _sum(request: SumRequest, fabric: Fabric) -> Generator[Any, Any, Array]:
    total = _empty(len(request.array), request.array)
    total[:] = request.array
    fabric.stats.payload_bytes += total.nbytes
    schedule, _ = fabric.allreduce(
        total, type_name(total), Reduction.SUM, postscale=request.scale, device=device_name(total), staged=False
    )
    yield from schedule
    return total


def _gather(request: GatherRequest, fabric: Fabric) -> Generator[Any, Any, list[Array]]:
    payload = request.payload
    fabric.stats.payload_bytes += payload.nbytes
    lengths = yield from _lengths([len(payload)], fabric)
    gathered = _empty(sum(int(n) for n in lengths), payload)
    yield from fabric.allgather(payload, gathered, [int(n) for n in lengths])
    return _cut(gathered, lengths)


def _all_to_all(request: AllToAllRequest, fabric: Fabric) -> Generator[Any, Any, list[Array]]:
    payloads = list(request.payloads)
    fabric.stats.payload_bytes += sum(payload.nbytes for payload in payloads)
    sent = [len(payload) for payload in payloads]
    table = (yield from _lengths(sent, fabric)).reshape(fabric.size, fabric.size)
    received = [int(n) for n in table[:, fabric.group.index]]
    outgoing = _empty(sum(sent), payloads[0])
    for part, payload in zip(_cut(outgoing, sent), payloads, strict=True):
        part[:] = payload
    incoming = _empty(sum(received), payloads[0])
    yield from fabric.alltoall(outgoing, sent, incoming, received)
    return _cut(incoming, received)


def _lengths(own: Sequence[int], fabric: Fabric) -> Generator[Any, Any, Any]:
    """Every rank's lengths, so that payloads may differ: one small message more."""
    mine = np.array(own, np.int64)
    everyones = np.empty(len(own) * fabric.size, np.int64)
    yield from fabric.allgather(mine, everyones, [len(own)] * fabric.size)
    return everyones


def _empty(elements: int, like: Array) -> Array:
    return like.new_empty(elements) if is_torch(like) else np.empty(elements, like.dtype)


def _cut(whole: Array, lengths: Sequence[int]) -> list[Array]:
    parts, start = [], 0
    for length in lengths:
        parts.append(whole[start : start + int(length)])
        start += int(length)
    return parts


_FROM_MEAN = (Reduction.AVERAGE, Reduction.SUM)
_ANSWERS: dict[type, Callable[..., Generator[Any, Any, Any]]] = {
    SumRequest: _sum,
    GatherRequest: _gather,
    AllToAllRequest: _all_to_all,
}

