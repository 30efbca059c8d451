"""The ranks of a node look after one another: each watches the process of the next one.

Most launchers clean up after a rank that was killed; ``srun``, by default, leaves the others waiting for it for ever.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def processes_within_reach(
    rank: int, node: Sequence[int], allgather: Callable[[tuple[int, str]], Sequence[Any]]
) -> dict[int, int]:
    """Collective: the process numbers of the ranks of this node, this one included.

    Those of another container on the node are left out: there the number means another process.
    """
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    known = allgather((os.getpid(), namespace))
    return {other: known[other][0] for other in node if known[other][1] == known[rank][1]}


class Neighbour:
    """The rank after this one among those of its node, in a ring; nobody where it is alone.

    Args:
        processes: of the ranks of this node, by rank.
    """

    def __init__(self, own_rank: int, processes: Mapping[int, int]) -> None:
        ranks = sorted(processes)
        self.rank = ranks[(ranks.index(own_rank) + 1) % len(ranks)]
        self.pid = processes[self.rank]
        self._first_missed: float | None = None
        self._descriptor: int | None = None  # a number may soon be another's, or still a zombie's
        self._poll = select.poll()
        if self.rank != own_rank and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # not in this kernel, or forbidden in this container
                self._descriptor = os.pidfd_open(self.pid)
                self._poll.register(self._descriptor, select.POLLIN)

    def gone_s(self, now: float) -> float:
        """For how long it is known that the process has ended; 0 while it goes on."""
        if self._first_missed is None and self._descriptor is not None and self._poll.poll(0):
            self._first_missed = now
        return 0.0 if self._first_missed is None else now - self._first_missed

    def close(self) -> None:
        """Look no longer."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
