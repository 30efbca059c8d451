"""Recursive halving, and the same way back: what two partners exchange, round by round.

For a power of two of ranks. In round k, partners 2^k apart share out what both are still reducing: one keeps the lower
half of it, the other the upper. After log2 P rounds each has a chunk of its own; the rounds backwards bring all chunks
to all ranks, as each sends what it has kept and receives what it has given away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horo_lite.collectives.folding import core_size
from horo_lite.collectives.partition import even_offsets
from horo_lite.collectives.registry import Work
from horo_lite.interfaces import Array, Exchange, Group, Schedule


class Halving(NamedTuple):
    """One round, as one rank sees it.

    Attributes:
        partner: the transport's number of it.
        span: how many ranks have had their values combined after it.
        keeps_upper: this rank keeps the upper half, its partner the lower.
        kept: the part of the buffer that this rank goes on with.
        given: the part that its partner does.
    """

    partner: int
    span: int
    keeps_upper: bool
    kept: slice
    given: slice

    def in_rank_order(self, mine: Array, theirs: Array) -> tuple[Array, Array]:
        """Both partners combine in the same order, for the same bits everywhere."""
        return (theirs, mine) if self.keeps_upper else (mine, theirs)


def halvings(core: Group, elements: int) -> list[Halving]:
    """The rounds for a buffer of so many elements; none for one rank."""
    offsets = even_offsets(elements, core.size)
    rounds = []
    low, high = 0, core.size  # the chunks that this rank is still reducing
    distance = 1
    while distance < core.size:
        middle = (low + high) // 2
        lower, upper = slice(offsets[low], offsets[middle]), slice(offsets[middle], offsets[high])
        partner = core.ranks[core.index ^ distance]
        if core.index & distance:
            rounds.append(Halving(partner, 2 * distance, True, kept=upper, given=lower))
            low = middle
        else:
            rounds.append(Halving(partner, 2 * distance, False, kept=lower, given=upper))
            high = middle
        distance *= 2
    return rounds


def doubling_allgather(rounds: Sequence[Halving], buffer: Array) -> Schedule:
    """The way back, from a chunk on each rank to all chunks on all."""
    for half in reversed(rounds):
        yield Exchange(buffer[half.kept], half.partner, buffer[half.given], half.partner)


def halving_doubling_crossing(work: Work) -> int:
    """Elements that leave a node. Rounds within it come first, and leave each of its L ranks n / L to exchange."""
    if work.nodes == 1:
        return 0
    piece = -(-work.elements // core_size(work.size))
    per_node = work.ranks_per_node
    if per_node & (per_node - 1):
        return 2 * per_node * (core_size(work.size) - 1) * piece
    return 2 * (core_size(work.size) - per_node) * piece
