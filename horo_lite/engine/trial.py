"""Which all-reduce is fastest on this node: tried out, since libraries and machines differ more than models tell.

An MPI library that copies straight from another process beats staging through shared memory, one that may not (in
many containers) loses to it, and both change with the size of the caches. 0.3 s at most, once per set of hosts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from horo_lite.arrays import kernel, numpy_dtype
from horo_lite.collectives.registry import algorithm
from horo_lite.collectives.selection import Row
from horo_lite.interfaces import Reduction

if TYPE_CHECKING:
    from horo_lite.engine.fabric import Fabric

_BUDGET_S = 0.25
_REPEATS = 4  # the first one of each is not counted
_MARGIN = 2 / 3  # less is what other work on the machine makes of it, and the choice is kept for later jobs
_BEYOND_BYTES = 1 << 40


class Trial(NamedTuple):
    """A message of ``size_bytes`` stands for all up to ``limit_bytes``."""

    size_bytes: int
    limit_bytes: int
    candidates: tuple[str, ...]


_SMALL = ("recursive_doubling", "halving_doubling", "ring", "pairwise")
_LARGE = ("ring", "pairwise", "halving_doubling", "shared")
_TRIALS = {
    False: (
        Trial(16 << 10, 40 << 10, _SMALL), Trial(128 << 10, 360 << 10, _SMALL), Trial(1 << 20, 3 << 20, _LARGE),
        Trial(8 << 20, _BEYOND_BYTES, _LARGE),
    ),
    True: (
        Trial(16 << 10, 40 << 10, ("gathered", "pairwise")), Trial(128 << 10, 360 << 10, ("gathered", "pairwise")),
        Trial(1 << 20, _BEYOND_BYTES, ("pairwise", "shared")),
    ),
}  # by whether the kernel is wide


def try_algorithms(fabric: Fabric) -> Generator[Any, Any, tuple[tuple[Row, ...], bool]]:
    """Schedule: the measured rows of the selection table, and whether there was time for all of them.

    Only member 0's count. All members are on one node. The largest messages come first, which gain most; those for
    which no time is left are served by the algorithm of the next larger ones.
    """
    deadline = time.perf_counter() + _BUDGET_S
    rows = []
    over = np.zeros(1, np.uint8)
    for wide, trials in _TRIALS.items():
        limits: list[tuple[int, str]] = []
        for trial in reversed(trials):
            if limits and (over[0] or trial.limit_bytes <= fabric.settled_bytes):
                continue
            took_s = yield from _try(fabric, trial, wide)
            name = preferred(took_s)
            if not limits or limits[0][1] != name:
                limits.insert(0, (trial.limit_bytes, name))
            over[0] = time.perf_counter() > deadline
            yield from fabric.broadcast(over, 0)
        rows.append(Row("allreduce", fabric.size, fabric.size, wide, tuple(limits)))
    return tuple(rows), not over[0]


def preferred(took_s: Mapping[str, float]) -> str:
    """The fastest; but shared memory, which moves least, unless another one is clearly faster."""
    fastest = min(took_s, key=lambda name: took_s[name])
    return "shared" if _MARGIN * took_s.get("shared", math.inf) < took_s[fastest] else fastest


def _try(fabric: Fabric, trial: Trial, wide: bool) -> Generator[Any, Any, dict[str, float]]:
    type_name = "float16" if wide else "float32"
    arithmetic = kernel(type_name, Reduction.SUM, fabric.size)
    dtype = numpy_dtype(type_name)
    buffer = np.zeros(trial.size_bytes // dtype.itemsize, dtype)
    rounds_s: dict[str, list[float]] = {
        name: [] for name in trial.candidates if name != "shared" or fabric.stages
    }
    for _ in range(_REPEATS):  # in turn, so that what else the machine does falls on all of them
        for name, took_s in rounds_s.items():
            yield from algorithm("barrier", "dissemination")(fabric.group)
            started = time.perf_counter()
            yield from fabric.run(name, buffer, arithmetic)
            took_s.append(time.perf_counter() - started)
    return {name: min(took_s[1:]) for name, took_s in rounds_s.items()}
