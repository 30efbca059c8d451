"""Timing that survives a noisy machine: competitors take turns within one run, and only their ratios count.

A round times every competitor once, so that whatever else the machine does falls on all of them. The slowest rank
counts, as the step of a training job would wait for it; the median over rounds is reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

Times = dict[str, list[float]]
"""By competitor, the seconds of one call in each round, on the slowest rank."""


class Comm(Protocol):
    """What is asked of an mpi4py communicator."""

    def Barrier(self) -> None: ...

    def allgather(self, value: Any) -> list[Any]: ...


def in_turn(competitors: Mapping[str, Callable[[], Any]], comm: Comm, rounds: int, calls: int = 1) -> Times:
    """Time competitors round robin, after one call each that is not counted.

    Args:
        competitors: what is called, by name; the same names in the same order on every rank.
        comm: the ranks that start each measurement together.
        rounds: measurements of each competitor.
        calls: how often it is called within one measurement (many for what takes microseconds).
    """
    own: Times = {name: [] for name in competitors}
    for call in competitors.values():
        call()
    for _ in range(rounds):
        for name, call in competitors.items():
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            own[name].append((time.perf_counter() - start) / calls)
    ranks = comm.allgather(own)
    return {name: [max(times) for times in zip(*(of[name] for of in ranks), strict=True)] for name in own}


def medians(times: Times) -> dict[str, float]:
    """The median over rounds of each competitor."""
    return {name: statistics.median(values) for name, values in times.items()}


def ratio(times: Times, slow: str, fast: str) -> float:
    """How many times faster ``fast`` is than ``slow``: the median of the rounds' own ratios, since the two of one
    round met the same machine.
    """
    return statistics.median(s / f for s, f in zip(times[slow], times[fast], strict=True))


def calls_for(fastest_s: float, slowest_s: float) -> int:
    """How many calls make one measurement of competitors of which single calls took this long: enough of the fastest
    for the clock and for a barrier's own spread, not so many of the slowest that the run never ends.
    """
    return max(1, min(500, int(2e-3 / max(fastest_s, 1e-7)), int(0.2 / max(slowest_s, 1e-7))))
