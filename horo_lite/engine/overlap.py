"""Whether buckets are reduced while backward goes on: it hides communication, and costs a thread on some core."""

from __future__ import annotations

import statistics
import time

from horo_lite.transport.topology import Topology
from horo_lite.transport.waiting import available_cores


def core_is_free(topology: Topology) -> bool:
    """More cores than ranks on this node, or a network to wait for, which takes no core."""
    return topology.size > 1 and (len(topology.nodes) > 1 or topology.local_size < available_cores())


class OverlapChoice:
    """Whether buckets go while backward does, by what the first steps took each way.

    Which way a rank goes changes no result, only when its buckets start, so each rank decides for itself.

    Args:
        wish: "on", "off" or "auto".
        worth_trying: a core is free for the communication thread.
    """

    _WARM_UP_STEPS = 2
    _TRIAL_STEPS = 5

    def __init__(self, wish: str, worth_trying: bool) -> None:
        self.on = wish == "on"
        self.worth_trying = wish == "on" or (wish == "auto" and worth_trying)
        self._trying = wish == "auto" and worth_trying
        self._steps = 0
        self._ended = 0.0
        self._took_s: dict[bool, list[float]] = {True: [], False: []}

    def step_ended(self) -> None:
        """Called after every step; with "auto", tries both ways in turn and then keeps the faster one."""
        if not self._trying:
            return
        now = time.perf_counter()
        if self._steps > self._WARM_UP_STEPS:
            self._took_s[self.on].append(now - self._ended)
        self._steps += 1
        self._ended = now
        if len(self._took_s[True]) >= self._TRIAL_STEPS and len(self._took_s[False]) >= self._TRIAL_STEPS:
            self._trying = False
            self.on = statistics.median(self._took_s[True]) < statistics.median(self._took_s[False])
        else:
            self.on = not self.on
