"""How a rank waits: at first for latency, then so that it leaves the core to whoever needs it.

MPI's own waits spin; with more ranks or threads than cores that costs 5 ms a message. Here a waiting thread polls
for a while, then offers its core to others between polls, then sleeps for longer and longer, at most 1 ms.
"""

from __future__ import annotations

import os
import time

_LONGEST_SLEEP_S = 1e-3
_FIRST_SLEEP_S = 20e-6


def available_cores() -> int:
    """How many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_crowded(ranks: int) -> bool:
    """True with more ranks on this node than cores; a rank that is bound to one core sees the others' too."""
    return ranks > max(available_cores(), os.cpu_count() or 1)


class Backoff:
    """The pauses of one waiting thread.

    Args:
        spin_polls: polls (about 1 us each) before the core is offered to others at all; 0 with more ranks than cores.
        yield_s: how long the thread then naps between polls (``sleep(0)``, about 60 us on Linux: with more ranks
            than cores that is quicker than ``sched_yield``, which comes back too soon) before it sleeps for longer.
    """

    __slots__ = ("_polls", "_sleep_s", "_spin_polls", "_yield_s", "_yielding_since")

    def __init__(self, spin_polls: int = 100, yield_s: float = 2e-3) -> None:
        self._spin_polls = spin_polls
        self._yield_s = yield_s
        self.reset()

    def reset(self) -> None:
        """Something has moved: wait for the next thing eagerly again."""
        self._polls = 0
        self._yielding_since = 0.0
        self._sleep_s = _FIRST_SLEEP_S

    def pause(self) -> None:
        """Called when a poll found nothing."""
        self._polls += 1
        if self._polls <= self._spin_polls:
            return
        if not self._yielding_since:
            self._yielding_since = time.perf_counter()
        if time.perf_counter() - self._yielding_since < self._yield_s:
            time.sleep(0)
            return
        time.sleep(self._sleep_s)
        self._sleep_s = min(2 * self._sleep_s, _LONGEST_SLEEP_S)
