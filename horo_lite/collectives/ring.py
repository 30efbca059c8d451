"""Ring algorithms: every rank sends to its right neighbour and receives from its left one.

One rotation serves all-reduce, reduce-scatter and all-gather. With N ranks, n elements and chunks
of n/N, each step moves one chunk by one rank; a chunk of more than ``segment_elements`` travels in
S segments, and segment k+1 is received while segment k is being reduced.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69(2), 2009.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from horo_lite.collectives.partition import even_offsets, offsets_of, segment_of, segments_of
from horo_lite.collectives.registry import SEGMENT_ELEMENTS, Cost, Work, register
from horo_lite.interfaces import Array, Group, Kernel, Recv, Schedule, Send, Token, Wait

RECEIVES_AHEAD = 2
"""Receives under way before one is waited for: the second hides the latency of asking for it."""


def _rotation_cost(work: Work, steps: int, reducing: int) -> Cost:
    segments = segments_of(work.chunk, work.segment_elements)
    return Cost(
        steps=steps,
        messages=steps * segments,
        sent=steps * work.chunk,
        combined=2 * reducing * work.chunk,
        crossing=steps * work.chunk if work.nodes > 1 else 0,  # by the node's last rank alone
        segments=segments,
    )


def _allreduce_cost(work: Work) -> Cost:
    return _rotation_cost(work, 2 * (work.size - 1), work.size - 1)


def _reduce_scatter_cost(work: Work) -> Cost:
    return _rotation_cost(work, work.size - 1, work.size - 1)


def _allgather_cost(work: Work) -> Cost:
    return _rotation_cost(work, work.size - 1, 0)


@register("allreduce", "ring", cost=_allreduce_cost, wide=False)
def ring_allreduce(
    group: Group, buffer: Array, kernel: Kernel, *, segment_elements: int = SEGMENT_ELEMENTS
) -> Schedule:
    """All-reduce in place: reduce-scatter, then all-gather, pipelined across the seam.

    Steps: 2 (N - 1). Elements sent per rank: 2 n (N - 1) / N, the least possible.
    Wins for large messages; it loads each link evenly, whatever the network.
    """
    if group.size == 1:
        kernel.combine(buffer, (buffer,), last=True)
        return
    yield from _rotate(
        group,
        buffer,
        even_offsets(len(buffer), group.size),
        kernel,
        segment_elements,
        first=group.index - 1,
        steps=2 * (group.size - 1),
        reducing=group.size - 1,
    )


@register("reduce_scatter", "ring", cost=_reduce_scatter_cost, wide=False)
def ring_reduce_scatter(
    group: Group,
    buffer: Array,
    counts: Sequence[int],
    kernel: Kernel,
    *,
    segment_elements: int = SEGMENT_ELEMENTS,
    last: bool = True,
) -> Schedule:
    """Reduce-scatter in place, uneven: member i ends with its ``counts[i]`` elements reduced.

    The rest of ``buffer`` holds partial results. ``last=False`` leaves the final scaling to a later
    stage.

    Steps: N - 1. Elements sent per rank: n (N - 1) / N, the least possible. Wins for large
    messages.
    """
    if group.size == 1:
        if last:
            kernel.combine(buffer, (buffer,), last=True)
        return
    yield from _rotate(
        group,
        buffer,
        offsets_of(counts),
        kernel,
        segment_elements,
        first=group.index - 1,
        steps=group.size - 1,
        reducing=group.size - 1,
        last=last,
    )


@register("allgather", "ring", cost=_allgather_cost)
def ring_allgather(
    group: Group, buffer: Array, counts: Sequence[int], *, segment_elements: int = SEGMENT_ELEMENTS
) -> Schedule:
    """All-gather in place, ragged: member i begins with its ``counts[i]`` elements in place.

    Steps: N - 1. Elements sent per rank: n (N - 1) / N for n elements over all. Wins for large
    messages.
    """
    if group.size > 1:
        yield from _rotate(
            group,
            buffer,
            offsets_of(counts),
            None,
            segment_elements,
            first=group.index,
            steps=group.size - 1,
            reducing=0,
        )


def _rotate(
    group: Group,
    buffer: Array,
    offsets: Sequence[int],
    kernel: Kernel | None,
    segment_elements: int,
    *,
    first: int,
    steps: int,
    reducing: int,
    last: bool = True,
) -> Schedule:
    """Send chunk ``first``, then in each step pass on what came in, at first after reducing it.

    In step s a rank sends chunk ``first - s`` and receives chunk ``first - s - 1``. Items count
    segments through all steps: item t is received into the place from which, S items later, it is
    sent on. The first ``reducing`` steps reduce; ``kernel`` may be None where there are none.
    """
    size = group.size
    left, right = group.ranks[group.index - 1], group.ranks[(group.index + 1) % size]
    longest = max(stop - start for start, stop in itertools.pairwise(offsets))
    segments = segments_of(longest, segment_elements)
    items, reducing_items = steps * segments, reducing * segments

    def place(item: int) -> Array:
        step, segment = divmod(item, segments)
        return buffer[segment_of(offsets, (first - step) % size, segment, segments)]

    # MPI wants no memory in a send and a receive at once. An all-gather item t lands where send
    # t - (N - 1) S began, and each item waits for one send: so no receive is further ahead than
    # that.
    ahead = min(RECEIVES_AHEAD, (size - 1) * segments, items)
    slots = ahead + 1
    slot_elements = -(-longest // segments)
    scratch = kernel.empty(slots * slot_elements) if kernel is not None else None

    def ask(item: int) -> Schedule:
        """Post a receive; returns its token, where it lands and where its value belongs."""
        incoming = target = place(item + segments)
        if scratch is not None and item < reducing_items:
            start = item % slots * slot_elements
            incoming = scratch[start : start + len(target)]
        return (yield Recv(incoming, left)), incoming, target

    sends: deque[Token] = deque()
    for item in range(segments):
        sends.append((yield Send(place(item), right)))
    receives: deque[tuple[Token, Array, Array]] = deque()
    for item in range(ahead):
        receives.append((yield from ask(item)))
    for item in range(items):
        arrival, incoming, target = receives.popleft()
        yield Wait((arrival, sends.popleft()))
        if item + ahead < items:
            receives.append((yield from ask(item + ahead)))
        if kernel is not None and item < reducing_items:
            kernel.combine(target, (incoming, target), last and item >= reducing_items - segments)
        if item + segments < items:
            sends.append((yield Send(target, right)))
