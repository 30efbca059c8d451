"""Collective algorithms as schedules: who sends which chunk to whom and when, and nothing else.

A schedule is a generator over the instructions of ``interfaces``, with the reduction passed in. It
does no I/O: the MPI driver, the simulator and a world of one carry out the same generators.
``registry`` has them by operation and name, with their costs; ``selection`` chooses among them.
"""

from __future__ import annotations

from horo_lite.collectives import (
    adasum,
    allgather,
    barrier,
    broadcast,
    doubling,
    hierarchical,
    native,
    pairwise,
    ring,
    shared_memory,
)
from horo_lite.collectives.registry import Algorithm, Cost, Work, algorithm, algorithms, operations

__all__ = ["Algorithm", "Cost", "Work", "algorithm", "algorithms", "operations"]
