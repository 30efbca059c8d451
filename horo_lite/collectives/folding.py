"""How an algorithm for 2^k ranks serves any number: the others hand their data to a neighbour.

With r = N - 2^k: of the first 2r members, the odd ones are folded into the even ones before them.
What remains is a group of 2^k *core* members in the old order. Afterwards each folded member gets
the result from its neighbour.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19(1), 2005.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from horo_lite.collectives.registry import Cost, Work
from horo_lite.interfaces import Array, Group, Kernel, Recv, Schedule, Send, Wait


class Fold(NamedTuple):
    """One member's part in the folding."""

    core: Group
    """The core members, seen from this one or from the one into which it is folded."""
    into: int | None
    """The rank into which this member is folded."""
    takes: int | None
    """The rank that is folded into this member."""


def core_size(size: int) -> int:
    """The largest power of two up to ``size``."""
    return 1 << (size.bit_length() - 1)


@functools.lru_cache(maxsize=1024)
def fold(group: Group) -> Fold:
    """The part of the group's own member."""
    extra = group.size - core_size(group.size)
    folded = 2 * extra
    core_ranks = group.ranks[:folded:2] + group.ranks[folded:]
    if group.index >= folded:
        return Fold(Group(core_ranks, group.index - extra), None, None)
    core = Group(core_ranks, group.index // 2)
    partner = group.ranks[group.index ^ 1]
    return Fold(core, partner, None) if group.index % 2 else Fold(core, None, partner)


def folded(
    group: Group,
    buffer: Array,
    kernel: Kernel,
    among_core: Callable[[Group, Array], Schedule],
    take_in: Callable[[Array], None] | None = None,
) -> Schedule:
    """Schedule: an all-reduce in place for any number of ranks, from one for the core members.

    Args:
        among_core: is given the core group and scratch as long as the buffer; applies the scale.
        take_in: makes the values of a folded member part of the buffer; by default reduces them.
    """
    if group.size == 1:
        kernel.combine(buffer, (buffer,), last=True)
        return
    core, into, takes = fold(group)
    if into is not None:
        yield Wait(((yield Send(buffer, into)),))
        yield Wait(((yield Recv(buffer, into)),))
        return
    scratch = kernel.empty(len(buffer))
    if takes is not None:
        yield Wait(((yield Recv(scratch, takes)),))
        if take_in is None:
            kernel.combine(buffer, (buffer, scratch))
        else:
            take_in(scratch)
    yield from among_core(core, scratch)
    if takes is not None:
        yield Wait(((yield Send(buffer, takes)),))


def folding_cost(work: Work, core: Cost) -> Cost:
    """``core``'s cost for a member into which another is folded, where there is one."""
    if work.size == core_size(work.size):
        return core
    return core._replace(
        steps=core.steps + 2,
        messages=core.messages + 1,
        sent=core.sent + work.elements,
        combined=core.combined + 2 * work.elements,
        crossing=work.ranks_per_node * (core.sent + work.elements) if work.nodes > 1 else 0,
    )


def doubling_rounds_across(work: Work) -> int:
    """How many of the rounds k, between members 2^k apart, cross nodes (at most, for odd nodes)."""
    if work.nodes == 1:
        return 0
    rounds = (work.size - 1).bit_length()
    within = work.ranks_per_node.bit_length() - 1
    return rounds - within if work.ranks_per_node == 1 << within else rounds
