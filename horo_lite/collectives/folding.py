"""How an algorithm for 2^k ranks serves any number: r = N - 2^k ranks hand their data to a neighbour and wait.

Of the first 2r members, the odd ones are folded into the even ones before them. What remains is a group of 2^k *core*
members in the old order. Afterwards each folded member gets the result from its neighbour.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005.
"""

from __future__ import annotations

from typing import NamedTuple

from horo_lite.interfaces import Group


class Fold(NamedTuple):
    """One member's part in the folding."""

    core: Group | None
    """The core group; None on a member that is folded into another."""
    partner: int | None
    """The transport's number of the member that is folded into this one, or into which this one is folded."""


def core_size(size: int) -> int:
    """The largest power of two up to ``size``."""
    return 1 << (size.bit_length() - 1)


def fold(group: Group) -> Fold:
    """The part of the group's own member."""
    extra = group.size - core_size(group.size)
    index, folded = group.index, 2 * extra
    partner = group.ranks[index ^ 1] if index < folded else None
    if index < folded and index % 2:
        return Fold(None, partner)
    core_index = index // 2 if index < folded else index - extra
    return Fold(Group(group.ranks[:folded:2] + group.ranks[folded:], core_index), partner)
