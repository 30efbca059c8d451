"""Adasum: gradients added as far as they are orthogonal and averaged as far as they are parallel.

    Adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

applied to pairs, pairs of pairs and so on. Equal gradients give that gradient again.

Source: Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021
(arXiv:2006.02924), algorithm 1.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import numpy as np

from horo_lite.collectives.folding import core_size, folded, folding_cost
from horo_lite.collectives.halving import doubling_allgather, halving_doubling_crossing, halvings
from horo_lite.collectives.registry import Cost, Work, register
from horo_lite.interfaces import Array, Exchange, Group, Kernel, Schedule

_DOTS_BYTES = 24  # three float64 for each tensor: a.b, a.a and b.b


def _cost(work: Work) -> Cost:
    core = core_size(work.size)
    rounds = core.bit_length() - 1
    dot_rounds = rounds * (rounds + 1) // 2
    moved = 2 * (core - 1) * -(-work.elements // core)
    halving_doubling = Cost(
        steps=2 * rounds + dot_rounds,
        messages=2 * rounds + dot_rounds,
        sent=moved,
        combined=4 * moved,  # three dot products and a blend of two inputs each
        crossing=halving_doubling_crossing(work),
        control_bytes=dot_rounds * _DOTS_BYTES * work.tensors,
    )
    return folding_cost(work, halving_doubling)


@register("adasum", "halving_doubling", cost=_cost, wide=False)
def adasum_allreduce(
    group: Group, buffer: Array, kernel: Kernel, *, boundaries: Sequence[int] = ()
) -> Schedule:
    """Adasum in place, by recursive vector halving; dot products are taken per tensor.

    Args:
        boundaries: where each tensor of the buffer begins, and the end: ``(0, ..., len(buffer))``.
            One tensor when empty.

    In round k two halves of 2^k ranks each hold a vector in pieces. Partners exchange halves of
    their pieces, all 2^(k+1) ranks add up the pieces' dot products, and each blends what it keeps.
    Where N is no power of two, r = N - P ranks are first blended into their neighbours (see
    ``folding``).

    With P = 2^K the largest power of two up to N, T tensors. Steps: 2 K + K (K + 1) / 2, and 2 more
    unless N = P. Sent per rank: 2 n (P - 1) / P elements, n more by a rank that another is folded
    into, and 24 T bytes of dot products K (K + 1) / 2 times; scratch n.
    """
    bounds = tuple(boundaries) or (0, len(buffer))

    def take_in(theirs: Array) -> None:
        _blend(kernel, bounds, 0, buffer, theirs, buffer, _dots(kernel, bounds, 0, buffer, theirs))

    def among_core(core: Group, scratch: Array) -> Schedule:
        rounds = halvings(core, len(buffer))
        own = buffer
        for half in rounds:
            own = buffer[half.kept]
            theirs = scratch[: len(own)]
            yield Exchange(buffer[half.given], half.partner, theirs, half.partner)
            start, (a, b) = half.kept.start, half.in_rank_order(own, theirs)
            dots = _dots(kernel, bounds, start, a, b)
            yield from _add_up(core, half.span, dots)
            _blend(kernel, bounds, start, a, b, own, dots)
        kernel.combine(own, (own,), last=True)
        yield from doubling_allgather(rounds, buffer)

    return folded(group, buffer, kernel, among_core, take_in)


def _tensors_within(
    bounds: Sequence[int], start: int, elements: int
) -> Iterator[tuple[int, slice]]:
    """Which tensors lie in ``elements`` from ``start`` on, and where, counted from ``start``."""
    stop = start + elements
    tensor = max(0, bisect.bisect_right(bounds, start) - 1)
    while tensor < len(bounds) - 1 and bounds[tensor] < stop:
        yield (
            tensor,
            slice(max(bounds[tensor], start) - start, min(bounds[tensor + 1], stop) - start),
        )
        tensor += 1


def _dots(kernel: Kernel, bounds: Sequence[int], start: int, a: Array, b: Array) -> np.ndarray:
    """This rank's share of every tensor's a.b, a.a and b.b."""
    dots = np.zeros((len(bounds) - 1, 3))
    for tensor, span in _tensors_within(bounds, start, len(a)):
        left, right = a[span], b[span]
        dots[tensor] = (
            kernel.inner(left, right),
            kernel.inner(left, left),
            kernel.inner(right, right),
        )
    return dots.reshape(-1)


def _add_up(core: Group, span: int, dots: np.ndarray) -> Schedule:
    """Sum ``dots`` over the aligned ``span`` members around this one, by recursive doubling."""
    received = np.empty_like(dots)
    distance = 1
    while distance < span:
        other = core.ranks[core.index ^ distance]
        yield Exchange(dots, other, received, other)
        dots += received
        distance *= 2


def _blend(
    kernel: Kernel,
    bounds: Sequence[int],
    start: int,
    a: Array,
    b: Array,
    out: Array,
    dots: np.ndarray,
) -> None:
    """out = Adasum(a, b), tensor by tensor."""
    by_tensor = dots.reshape(-1, 3)
    for tensor, span in _tensors_within(bounds, start, len(out)):
        dot, a_norm, b_norm = (float(value) for value in by_tensor[tensor])
        kernel.blend(out[span], a[span], _factor(dot, a_norm), b[span], _factor(dot, b_norm))


def _factor(dot: float, norm: float) -> float:
    """1 - dot / (2 norm); a zero gradient has nothing in common with another."""
    return 1.0 - dot / (2.0 * norm) if norm != 0.0 else 1.0
