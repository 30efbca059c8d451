"""Gather: every member's piece to one of them."""

from __future__ import annotations

from collections.abc import Sequence

from horo_lite.collectives.registry import Cost, Work, register
from horo_lite.interfaces import Array, Group, Recv, Schedule, Send, Wait


def _cost(work: Work) -> Cost:
    if work.size == 1:
        return Cost(0, 0, 0, copied=work.elements)
    crossing = work.ranks_per_node * work.elements if work.nodes > 1 else 0
    return Cost(1, 1, work.elements, crossing=crossing, waiting=(work.size - 2) * work.elements)


@register("gather", "linear", cost=_cost)
def linear_gather(group: Group, piece: Array, pieces: Sequence[Array], root: int = 0) -> Schedule:
    """Gather, ragged: ``pieces[i]`` on ``root`` (unused elsewhere) becomes member i's ``piece``.

    Steps: 1, with N - 1 messages under way at the root. Elements sent per rank: its piece; the root
    receives all. A tree would save messages at the root, but move bytes more than once.
    """
    if group.index != root:
        yield Wait(((yield Send(piece, group.ranks[root])),))
        return
    tokens = []
    for member, rank in enumerate(group.ranks):
        if member != root:
            tokens.append((yield Recv(pieces[member], rank)))
    pieces[root][:] = piece
    yield Wait(tokens)
