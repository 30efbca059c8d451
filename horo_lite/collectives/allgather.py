"""All-gather by dissemination, for short messages (the ring's is in ``ring``, for long ones)."""

from __future__ import annotations

from collections.abc import Sequence

from horo_lite.collectives.partition import offsets_of
from horo_lite.collectives.registry import Cost, Work, register
from horo_lite.interfaces import Array, Group, Recv, Schedule, Send, Wait


def bruck_cost(work: Work) -> Cost:
    """See ``bruck_allgather``."""
    rounds = (work.size - 1).bit_length()
    crossing = 0
    if work.nodes > 1:
        # In a round of distance d, d ranks of a node (or all of them) send beyond it.
        for distance in (1 << k for k in range(rounds)):
            members = min(distance, work.size - distance)
            crossing += min(distance, work.ranks_per_node) * members * work.chunk
    # A rank sends a range of chunks as one message or, where the range wraps around the end of the
    # buffer, as two.
    return Cost(rounds, 2 * rounds, (work.size - 1) * work.chunk, crossing=crossing)


@register("allgather", "bruck", cost=bruck_cost)
def bruck_allgather(group: Group, buffer: Array, counts: Sequence[int]) -> Schedule:
    """All-gather in place, ragged: member i begins with its ``counts[i]`` elements in place.

    In round k everyone holds the chunks of 2^k members, its own first, and sends them (or as many
    as are still wanted) 2^k members back. Chunks go straight to their places, so Bruck's final
    rotation and its scratch are not needed; in return a range that wraps around takes a second
    message.

    Steps: ceil(log2 N), for any N. Elements sent per rank: n (N - 1) / N, with at most 2 ceil(log2
    N) messages.
    Wins for short messages.
    Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all
    communications in multiport message-passing systems", IEEE TPDS 8(11), 1997.
    """
    size, index = group.size, group.index
    offsets = offsets_of(counts)

    def ranges(first: int, members: int) -> list[Array]:
        """The chunks of so many members from ``first`` on, around the end: one view or two."""
        last = first + members
        if last <= size:
            return [buffer[offsets[first] : offsets[last]]]
        return [buffer[offsets[first] :], buffer[: offsets[last - size]]]

    held = 1
    while held < size:
        members = min(held, size - held)
        source, target = (index + held) % size, (index - held) % size
        tokens = []
        for incoming in ranges(source, members):
            tokens.append((yield Recv(incoming, group.ranks[source])))
        for outgoing in ranges(index, members):
            tokens.append((yield Send(outgoing, group.ranks[target])))
        yield Wait(tokens)
        held += members
