"""All-reduce in log N steps: recursive doubling, halving-doubling, and gathering all.

With N ranks, n elements, and P the largest power of two up to N. Where N is no power of two,
``folding`` adds two steps. Two partners combine their values in rank order, so that both get the
same bits (a NaN's payload too) and every rank's result has the same association.
"""

from __future__ import annotations

from horo_lite.collectives.allgather import bruck_allgather, bruck_cost
from horo_lite.collectives.folding import core_size, doubling_rounds_across, folded, folding_cost
from horo_lite.collectives.partition import chunks, even_offsets
from horo_lite.collectives.registry import Cost, Work, register
from horo_lite.interfaces import Array, Exchange, Group, Kernel, Schedule


def _recursive_doubling_cost(work: Work) -> Cost:
    rounds = core_size(work.size).bit_length() - 1
    moved = rounds * work.elements
    crossing = work.ranks_per_node * doubling_rounds_across(work) * work.elements
    return folding_cost(work, Cost(rounds, rounds, moved, 2 * moved, crossing=crossing))


def halving_doubling_crossing(work: Work) -> int:
    """Rounds within a node come first, which leave each of its L ranks with n / L to exchange."""
    if work.nodes == 1:
        return 0
    piece = -(-work.elements // core_size(work.size))
    per_node = work.ranks_per_node
    if per_node & (per_node - 1):
        return 2 * per_node * (core_size(work.size) - 1) * piece
    return 2 * (core_size(work.size) - per_node) * piece


def _halving_doubling_cost(work: Work) -> Cost:
    core = core_size(work.size)
    rounds = core.bit_length() - 1
    moved = 2 * (core - 1) * -(-work.elements // core)
    crossing = halving_doubling_crossing(work)
    return folding_cost(work, Cost(2 * rounds, 2 * rounds, moved, moved, crossing=crossing))


def _gathered_cost(work: Work) -> Cost:
    gathering = bruck_cost(work._replace(elements=work.size * work.elements))
    return gathering._replace(combined=work.size * work.elements, copied=work.elements)


@register("allreduce", "recursive_doubling", cost=_recursive_doubling_cost, wide=False)
def recursive_doubling_allreduce(group: Group, buffer: Array, kernel: Kernel) -> Schedule:
    """All-reduce in place: in round k, combine whole buffers with the member 2^k away.

    Steps: log2 P, and 2 more unless N = P. Elements sent per rank: n log2 P, and n more by a rank
    that another is folded into; scratch n. Wins for small messages, where only the number of steps
    matters.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005.
    """

    def among_core(core: Group, scratch: Array) -> Schedule:
        distance = 1
        while distance < core.size:
            other = core.ranks[core.index ^ distance]
            yield Exchange(buffer, other, scratch, other)
            inputs = (scratch, buffer) if core.index & distance else (buffer, scratch)
            distance *= 2
            kernel.combine(buffer, inputs, last=distance == core.size)

    return folded(group, buffer, kernel, among_core)


@register("allreduce", "halving_doubling", cost=_halving_doubling_cost, wide=False)
def halving_doubling_allreduce(group: Group, buffer: Array, kernel: Kernel) -> Schedule:
    """All-reduce in place: a reduce-scatter by recursive halving of the buffer, then the way back.

    Neighbours (2^0 apart) exchange the largest part and ranks far apart the smallest, which suits
    nodes of several ranks.

    Steps: 2 log2 P, and 2 more unless N = P. Elements sent per rank: 2 n (P - 1) / P, the ring's
    for N = P, and n more by a rank that another is folded into; scratch n. Wins for middle sizes:
    few steps, and no more bytes than a ring.
    Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.
    """

    def among_core(core: Group, scratch: Array) -> Schedule:
        offsets = even_offsets(len(buffer), core.size)
        low, high = 0, core.size  # the chunks that this rank is still reducing
        distance = 1
        while distance < core.size:
            other = core.ranks[core.index ^ distance]
            middle = (low + high) // 2
            keeps_upper = bool(core.index & distance)
            kept, given = (
                ((middle, high), (low, middle)) if keeps_upper else ((low, middle), (middle, high))
            )
            mine = buffer[offsets[kept[0]] : offsets[kept[1]]]
            theirs = scratch[: len(mine)]
            yield Exchange(buffer[offsets[given[0]] : offsets[given[1]]], other, theirs, other)
            low, high = kept
            distance *= 2
            kernel.combine(
                mine, (theirs, mine) if keeps_upper else (mine, theirs), last=distance == core.size
            )
        yield from doubling_allgather(core, buffer, offsets, low)

    return folded(group, buffer, kernel, among_core)


def doubling_allgather(
    core: Group, buffer: Array, offsets: tuple[int, ...], chunk: int
) -> Schedule:
    """The way back of halving-doubling: from a chunk on each of 2^k ranks to all chunks on all."""
    low, high = chunk, chunk + 1
    distance = core.size // 2
    while distance:
        other = core.ranks[core.index ^ distance]
        length = high - low
        # A rank with this bit set kept the upper half, so its partner holds the chunks just below.
        other_low = low - length if core.index & distance else high
        yield Exchange(
            buffer[offsets[low] : offsets[high]],
            other,
            buffer[offsets[other_low] : offsets[other_low + length]],
            other,
        )
        low = min(low, other_low)
        high = low + 2 * length
        distance //= 2


@register("allreduce", "gathered", cost=_gathered_cost)
def gathered_allreduce(group: Group, buffer: Array, kernel: Kernel) -> Schedule:
    """All-reduce in place: all-gather all inputs, then every rank adds them in rank order.

    Steps: ceil(log2 N). Elements sent per rank: n (N - 1); scratch n N.
    Wins for small messages of wide kernels, whose partial results must not travel.
    """
    size, elements = group.size, len(buffer)
    if size == 1:
        kernel.combine(buffer, (buffer,), last=True)
        return
    gathered = kernel.empty(size * elements)
    inputs = (
        chunks(gathered, range(0, size * elements + 1, elements)) if elements else [buffer] * size
    )
    kernel.copy(inputs[group.index], buffer)
    yield from bruck_allgather(group, gathered, (elements,) * size)
    kernel.combine(buffer, inputs, last=True)
