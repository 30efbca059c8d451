"""Barrier: nobody leaves before all have entered. Also the fence of ranks that share memory."""

from __future__ import annotations

import numpy as np

from horo_lite.collectives.registry import Cost, Work, register
from horo_lite.interfaces import Exchange, Group, Schedule

_NOTHING = np.empty(0, np.uint8)


def _cost(work: Work) -> Cost:
    rounds = (work.size - 1).bit_length()
    return Cost(rounds, rounds, 0)


@register("barrier", "dissemination", cost=_cost)
def dissemination_barrier(group: Group) -> Schedule:
    """In round k everyone tells the member 2^k further that all it knows of have entered.

    Steps: ceil(log2 N), for any N. Elements sent: none, the messages are empty.
    Source: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", IJPP 17(1),
    1988.
    """
    distance = 1
    while distance < group.size:
        target = group.ranks[(group.index + distance) % group.size]
        source = group.ranks[(group.index - distance) % group.size]
        yield Exchange(_NOTHING, target, _NOTHING, source)
        distance *= 2
