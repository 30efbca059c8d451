"""Pairwise algorithms: every rank talks to every other directly, in N - 1 rotated rounds.

The owner of a chunk receives it from all others and adds all N inputs at once, in rank order:
nothing is rounded on the way and the result does not depend on the route. So these serve wide
kernels (16-bit floats, integer averages) and move no more bytes than a ring.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19(1), 2005 (pairwise exchange).
"""

from __future__ import annotations

from collections.abc import Sequence

from horo_lite.collectives.partition import even_counts, offsets_of, segment_of, segments_of
from horo_lite.collectives.registry import SEGMENT_ELEMENTS, Cost, Work, register
from horo_lite.collectives.ring import ring_allgather
from horo_lite.interfaces import Array, Exchange, Group, Kernel, Recv, Schedule, Send, Token, Wait


def _crossing(work: Work) -> int:
    """Each rank of a node sends a chunk to each rank of other nodes."""
    return work.ranks_per_node * (work.size - work.ranks_per_node) * work.chunk


def _reduce_scatter_cost(work: Work) -> Cost:
    others = work.size - 1
    segments = segments_of(work.chunk, work.segment_elements)
    return Cost(
        steps=min(1, others),
        messages=others * segments,
        sent=others * work.chunk,
        combined=work.size * work.chunk,
        crossing=_crossing(work) if work.nodes > 1 else 0,
        segments=segments,
    )


def _allreduce_cost(work: Work) -> Cost:
    half = _reduce_scatter_cost(work)
    ring = (work.size - 1) * work.chunk if work.nodes > 1 else 0
    return half._replace(
        steps=half.steps + work.size - 1,
        messages=2 * half.messages,
        sent=2 * half.sent,
        crossing=half.crossing + ring,
    )


def _alltoall_cost(work: Work) -> Cost:
    others = work.size - 1
    return Cost(
        others,
        others,
        others * work.chunk,
        copied=work.chunk,
        crossing=_crossing(work) if work.nodes > 1 else 0,
    )


@register("allreduce", "pairwise", cost=_allreduce_cost)
def pairwise_allreduce(
    group: Group, buffer: Array, kernel: Kernel, *, segment_elements: int = SEGMENT_ELEMENTS
) -> Schedule:
    """All-reduce in place: chunk owners add all N inputs at once, then a ring all-gather.

    Steps: N. Elements sent per rank: 2 n (N - 1) / N, the ring's; scratch 2 (N - 1) segments.
    Wins for large messages of 16-bit floats, where a ring would round at each of its hops.
    """
    counts = even_counts(len(buffer), group.size)
    yield from pairwise_reduce_scatter(
        group, buffer, counts, kernel, segment_elements=segment_elements
    )
    yield from ring_allgather(group, buffer, counts, segment_elements=segment_elements)


@register("reduce_scatter", "pairwise", cost=_reduce_scatter_cost)
def pairwise_reduce_scatter(
    group: Group,
    buffer: Array,
    counts: Sequence[int],
    kernel: Kernel,
    *,
    segment_elements: int = SEGMENT_ELEMENTS,
) -> Schedule:
    """Reduce-scatter in place, uneven: member i reduces its ``counts[i]`` elements; others stay.

    Round s sends to the s-th neighbour on the right and receives from the s-th on the left, so that
    no rank is the target of all at once. Segment k+1 is received while segment k is being reduced.

    Steps: 1, as N - 1 messages are under way at once. Elements sent per rank: n (N - 1) / N;
    scratch 2 (N - 1) segments.
    Wins for wide kernels, and for few ranks.
    """
    size, index = group.size, group.index
    offsets = offsets_of(counts)
    segments = segments_of(max(counts), segment_elements)
    scratch_elements = -(-counts[index] // segments)
    scratch = kernel.empty(2 * (size - 1) * scratch_elements)

    def ask(segment: int) -> Schedule:
        """Post the receives of a segment; returns its inputs in rank order and the tokens."""
        mine = buffer[segment_of(offsets, index, segment, segments)]
        inputs: list[Array] = [mine] * size
        tokens: list[Token] = []
        for distance in range(1, size):
            source = (index - distance) % size
            start = ((segment % 2) * (size - 1) + distance - 1) * scratch_elements
            inputs[source] = scratch[start : start + len(mine)]
            tokens.append((yield Recv(inputs[source], group.ranks[source])))
        return inputs, tokens

    following = yield from ask(0)
    sends: list[Token] = []
    for segment in range(segments):
        for distance in range(1, size):
            target = (index + distance) % size
            outgoing = buffer[segment_of(offsets, target, segment, segments)]
            sends.append((yield Send(outgoing, group.ranks[target])))
    for segment in range(segments):
        inputs, arrivals = following
        yield Wait(arrivals)
        if segment + 1 < segments:
            following = yield from ask(segment + 1)
        kernel.combine(inputs[index], inputs, last=True)
    yield Wait(sends)


@register("alltoall", "pairwise", cost=_alltoall_cost)
def pairwise_alltoall(
    group: Group, outgoing: Sequence[Array], incoming: Sequence[Array]
) -> Schedule:
    """All-to-all: ``outgoing[j]`` goes to member j, ``incoming[j]`` comes from it, of any lengths.

    The two must not overlap. Views of one flat buffer are made by ``partition.chunks``.

    Steps: N - 1. Elements sent per rank: all that is for others. Each round pairs the ranks anew,
    so links are loaded evenly; it wins wherever bytes matter more than N latencies.
    """
    size, index = group.size, group.index
    incoming[index][:] = outgoing[index]
    for distance in range(1, size):
        target, source = (index + distance) % size, (index - distance) % size
        yield Exchange(outgoing[target], group.ranks[target], incoming[source], group.ranks[source])
