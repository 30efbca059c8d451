"""Broadcast: from one member's buffer to all others'.

With N ranks and n elements; members are numbered from the root on, so any root costs the same.
"""

from __future__ import annotations

from horo_lite.collectives.folding import doubling_rounds_across
from horo_lite.collectives.partition import even_offsets, segments_of
from horo_lite.collectives.registry import SEGMENT_ELEMENTS, Cost, Work, register
from horo_lite.interfaces import Array, Group, Recv, Schedule, Send, Wait


def _binomial_cost(work: Work) -> Cost:
    rounds = (work.size - 1).bit_length()
    # The root's node has the message first, and in each round beyond it all its ranks send.
    crossing = work.ranks_per_node * doubling_rounds_across(work) * work.elements
    return Cost(rounds, rounds, rounds * work.elements, crossing=crossing)


def _chain_cost(work: Work) -> Cost:
    if work.size == 1:
        return Cost(0, 0, 0)
    segments = segments_of(work.elements, work.segment_elements)
    return Cost(
        steps=work.size - 1,
        messages=segments,
        sent=work.elements,
        crossing=work.elements if work.nodes > 1 else 0,
        segments=segments,
        waiting=(work.size - 2) * -(-work.elements // segments),
    )


@register("broadcast", "binomial", cost=_binomial_cost)
def binomial_broadcast(group: Group, buffer: Array, root: int = 0) -> Schedule:
    """Broadcast along a binomial tree: in round k all who have the message send it 2^k further.

    Steps: ceil(log2 N). Elements sent per rank: n ceil(log2 N) by the root, less by others. Wins
    for small messages.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005.
    """
    size = group.size
    relative = (group.index - root) % size
    distance = 1
    while distance <= relative:
        distance *= 2
    if relative:
        parent = relative - distance // 2
        yield Wait(((yield Recv(buffer, group.ranks[(parent + root) % size])),))
    sends = []
    while relative + distance < size:
        sends.append((yield Send(buffer, group.ranks[(relative + distance + root) % size])))
        distance *= 2
    yield Wait(sends)


@register("broadcast", "chain", cost=_chain_cost)
def chain_broadcast(
    group: Group, buffer: Array, root: int = 0, *, segment_elements: int = SEGMENT_ELEMENTS
) -> Schedule:
    """Broadcast along a chain in S segments: segment k is passed on while k+1 comes in.

    Steps: N - 1 hops, filled with S segments: S + N - 2 segment times. Elements sent per rank: n;
    the last member sends none. Wins for large messages: for S much larger than N it takes the time
    of sending n once.
    Source: Saad and Schultz, "Data communication in parallel architectures", Parallel Computing
    11(2), 1989.
    """
    size = group.size
    relative = (group.index - root) % size
    before, after = group.ranks[group.index - 1], group.ranks[(group.index + 1) % size]
    segments = segments_of(len(buffer), segment_elements)
    offsets = even_offsets(len(buffer), segments)
    pieces = [buffer[offsets[k] : offsets[k + 1]] for k in range(segments)]
    arrivals = []
    if relative:
        for piece in pieces:
            arrivals.append((yield Recv(piece, before)))
    sends = []
    for k, piece in enumerate(pieces):
        if relative:
            yield Wait((arrivals[k],))
        if relative + 1 < size:
            sends.append((yield Send(piece, after)))
    yield Wait(sends)
