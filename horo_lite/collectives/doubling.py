"""All-reduce in log N steps: recursive doubling, halving-doubling, and gathering all.

With N ranks, n elements, and P the largest power of two up to N. Where N is no power of two,
``folding`` adds two steps. Two partners combine their values in rank order, so that both get the
same bits (a NaN's payload too) and every rank's result has the same association.
"""

from __future__ import annotations

from horo_lite.collectives.allgather import bruck_allgather, bruck_cost
from horo_lite.collectives.folding import core_size, doubling_rounds_across, folded, folding_cost
from horo_lite.collectives.halving import doubling_allgather, halving_doubling_crossing, halvings
from horo_lite.collectives.partition import chunks
from horo_lite.collectives.registry import Cost, Work, register
from horo_lite.interfaces import Array, Exchange, Group, Kernel, Schedule


def _recursive_doubling_cost(work: Work) -> Cost:
    rounds = core_size(work.size).bit_length() - 1
    moved = rounds * work.elements
    crossing = work.ranks_per_node * doubling_rounds_across(work) * work.elements
    return folding_cost(work, Cost(rounds, rounds, moved, 2 * moved, crossing=crossing))


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
        rounds = halvings(core, len(buffer))
        for half in rounds:
            mine = buffer[half.kept]
            theirs = scratch[: len(mine)]
            yield Exchange(buffer[half.given], half.partner, theirs, half.partner)
            kernel.combine(mine, half.in_rank_order(mine, theirs), last=half.span == core.size)
        yield from doubling_allgather(rounds, buffer)

    return folded(group, buffer, kernel, among_core)


@register("allreduce", "gathered", cost=_gathered_cost)
def gathered_allreduce(group: Group, buffer: Array, kernel: Kernel) -> Schedule:
    """All-reduce in place: all-gather all inputs, then every rank adds them in rank order.

    Steps: ceil(log2 N). Elements sent per rank: n (N - 1); scratch n N.
    Wins for small messages of wide kernels, whose partial results must not travel.
    Source: of the all-gather, Bruck, Ho, Kipnis, Upfal and Weathersby, IEEE TPDS 8(11), 1997.
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
