"""Which algorithm runs: by message size, ranks, ranks per node and kind of type, and nothing else.

A ``Table`` holds what was measured on a set of hosts (elsewhere: it only remembers); for anything
that was not measured it takes the algorithm with the least estimated time, from the cost functions
and a machine's parameters. Rank 0's table is sent to all, so all ranks choose alike and results
repeat from run to run.

::

    table = Table.from_json(text)
    name = table.choose("allreduce", buffer.nbytes, ranks=8, ranks_per_node=4, wide=kernel.wide)
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence

from horo_lite.collectives.registry import Algorithm, Work, algorithm, algorithms
from horo_lite.errors import ArgumentError

AUTO = "auto"
_FORMAT = 2
_ITEM_BYTES = 4  # of the elements that estimates are made for
_TOLERANCE = 1.1  # estimates are no better than that
# A rank of these sends to one neighbour only and receives from one, so links are loaded evenly and a connection stays
# at its speed; halving and doubling changes partners, which costs up to 15 % over TCP.
_STEADY = ("ring", "hierarchical")
_SIZES_BYTES = tuple(1 << power for power in range(6, 31))

Limits = tuple[tuple[int, str], ...]
"""Up to how many bytes each algorithm is taken, in rising order; the last one also beyond."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What estimates need to know; the defaults resemble nodes with 10 Gbit/s Ethernet.

    Attributes:
        latency_s: of a message from one node to another.
        bandwidth: bytes per second of a node's port, each way.
        local_latency_s: of a message within a node.
        local_bandwidth: bytes per second of a rank to others of its node.
        overhead_s: a rank's own time per message.
        reduce_rate: bytes of input per second that a rank reduces.
        copy_rate: bytes per second that a rank copies.
    """

    latency_s: float = 30e-6
    bandwidth: float = 1.1e9
    local_latency_s: float = 3e-6
    local_bandwidth: float = 5e9
    overhead_s: float = 2e-6
    reduce_rate: float = 15e9
    copy_rate: float = 15e9


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured for one operation on one layout.

    Attributes:
        operation: "allreduce", "broadcast", ...
        ranks: how many there are.
        ranks_per_node: how many share a node (the smallest node's number).
        wide: whether for kernels that need all inputs at once (16-bit floats, integer averages).
        limits: up to how many bytes each algorithm is taken.
    """

    operation: str
    ranks: int
    ranks_per_node: int
    wide: bool
    limits: Limits


@dataclasses.dataclass(frozen=True)
class Table:
    """A choice of algorithm for everything, made once and then the same everywhere.

    Attributes:
        rows: what was measured, if anything.
        machine: parameters for the estimates of what was not.

    Raises:
        ArgumentError: a row names an algorithm that does not exist, or its limits do not rise.
    """

    rows: tuple[Row, ...] = ()
    machine: Machine = Machine()

    def __post_init__(self) -> None:
        for row in self.rows:
            for _, name in row.limits:
                algorithm(row.operation, name)
            bounds = [bound for bound, _ in row.limits]
            if not bounds or bounds != sorted(set(bounds)):
                raise ArgumentError(
                    f"expected limits that rise from row to row, got {bounds} for {row.operation}"
                )

    def choose(
        self,
        operation: str,
        size_bytes: int,
        *,
        ranks: int,
        ranks_per_node: int = 1,
        wide: bool = False,
        context: Iterable[str] = (),
        override: str = AUTO,
    ) -> str:
        """The name of the algorithm for one message.

        Args:
            operation: "allreduce", "broadcast", ...
            size_bytes: of the whole buffer, as in ``registry.Work``.
            ranks: how many take part.
            ranks_per_node: how many of them share a node (the smallest node's number).
            wide: the kernel needs all inputs at once.
            context: what the caller can give, the same on every rank, such as "nodes" or "staging";
                an algorithm that needs anything else is not chosen.
            override: a name takes that algorithm wherever it can serve, "auto" the table's.

        Raises:
            ArgumentError: there is no such algorithm; lists those there are.
        """
        given = frozenset(context)
        one_node = ranks_per_node >= ranks
        if override != AUTO and _serves(algorithm(operation, override), wide, one_node, given):
            return override
        limits = self.limits(
            operation, ranks=ranks, ranks_per_node=ranks_per_node, wide=wide, context=given
        )
        return next((name for bound, name in limits if size_bytes <= bound), limits[-1][1])

    def limits(
        self,
        operation: str,
        *,
        ranks: int,
        ranks_per_node: int = 1,
        wide: bool = False,
        context: Iterable[str] = (),
    ) -> Limits:
        """What ``choose`` goes by: the measured row where it can serve, else estimates."""
        given = frozenset(context)
        one_node = ranks_per_node >= ranks
        measured = self._measured.get((operation, ranks, ranks_per_node, wide), ())
        entries = [algorithm(operation, name) for _, name in measured]
        if entries and all(_serves(entry, wide, one_node, given) for entry in entries):
            return measured
        return _estimated_limits(self.machine, operation, ranks, ranks_per_node, wide, given)

    @functools.cached_property
    def _measured(self) -> dict[tuple[str, int, int, bool], Limits]:
        return {
            (row.operation, row.ranks, row.ranks_per_node, row.wide): row.limits
            for row in self.rows
        }

    def to_json(self) -> str:
        """The table as text, for a file or a broadcast."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Table:
        """The table that ``to_json`` wrote.

        Raises:
            ArgumentError: the text is of another format, is damaged, or names an algorithm that
            does not exist.
        """
        try:
            content = json.loads(text)
            if content["format"] != _FORMAT:
                raise ArgumentError(
                    f"expected a selection table of format {_FORMAT}, got {content['format']}"
                )
            rows = [
                Row(**{**row, "limits": tuple((int(bound), name) for bound, name in row["limits"])})
                for row in content["rows"]
            ]
            return cls(tuple(rows), Machine(**content["machine"]))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ArgumentError(
                f"expected a selection table as JSON, got {text[:60]!r}: {error}"
            ) from error


def estimate_s(entry: Algorithm, work: Work, machine: Machine) -> float:
    """The time that an algorithm should take, from its cost function."""
    cost = entry.cost(work)
    if work.nodes == 1:
        latencies_s = (cost.steps + cost.local_steps) * machine.local_latency_s
        wire_s = _ITEM_BYTES * (cost.sent + cost.waiting) / machine.local_bandwidth
    else:
        latencies_s = cost.steps * machine.latency_s + cost.local_steps * machine.local_latency_s
        across_s = _ITEM_BYTES * (cost.crossing + cost.waiting) / machine.bandwidth
        within = max(0, cost.sent - cost.crossing // work.ranks_per_node)
        within_s = _ITEM_BYTES * within / machine.local_bandwidth
        # In segments, a chunk can be on its way within a node and across nodes at once.
        wire_s = max(across_s, within_s) if cost.segments > 1 else across_s + within_s
    arithmetic_s = _ITEM_BYTES * cost.combined / machine.reduce_rate
    return (
        latencies_s
        + max(wire_s, arithmetic_s)
        + min(wire_s, arithmetic_s) / cost.segments
        + _ITEM_BYTES * cost.local_sent / machine.local_bandwidth
        + _ITEM_BYTES * cost.copied / machine.copy_rate
        + cost.control_bytes / machine.local_bandwidth
        + cost.messages * machine.overhead_s
    )


def _serves(entry: Algorithm, wide: bool, one_node: bool, context: frozenset[str]) -> bool:
    return (entry.wide or not wide) and (one_node or not entry.one_node) and entry.needs <= context


@functools.lru_cache(maxsize=1024)
def _estimated_limits(
    machine: Machine,
    operation: str,
    ranks: int,
    ranks_per_node: int,
    wide: bool,
    context: frozenset[str],
) -> Limits:
    candidates = [
        entry
        for entry in algorithms(operation).values()
        if entry.name != "native" and _serves(entry, wide, ranks_per_node >= ranks, context)
    ]
    if not candidates:
        raise ArgumentError(f"no {operation} algorithm serves this kernel with {sorted(context)}")
    limits: list[tuple[int, str]] = []
    for size_bytes in _SIZES_BYTES:
        work = Work(size_bytes // _ITEM_BYTES, ranks, min(ranks_per_node, ranks))
        best = _best(candidates, work, machine)
        if limits and limits[-1][1] == best:
            limits.pop()
        limits.append((size_bytes, best))
    return tuple(limits)


def _best(candidates: Sequence[Algorithm], work: Work, machine: Machine) -> str:
    """The fastest by estimate; of those that are as good, the one with the steadiest traffic."""
    estimates_s = {entry.name: estimate_s(entry, work, machine) for entry in candidates}
    fastest = min(estimates_s, key=lambda name: (estimates_s[name], name))
    close_s = _TOLERANCE * estimates_s[fastest]
    return next((name for name in _STEADY if estimates_s.get(name, float("inf")) <= close_s), fastest)
