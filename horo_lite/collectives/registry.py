"""Every collective algorithm by operation and name, with what it can do and what it costs.

A schedule registers itself::

    @register("allreduce", "ring", wide=False, cost=ring_cost)
    def ring_allreduce(group, buffer, kernel, *, segment_elements): ...

and is called through its entry, ``algorithm("allreduce", "ring")(group, buffer, kernel,
**context)``. All algorithms of one operation take the same positional arguments. The context is
what some need and others do not (``nodes``, ``segment_elements``, ``staging``, ...): the entry
hands on what its algorithm has a keyword for.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from horo_lite.errors import ArgumentError
from horo_lite.interfaces import Schedule

SEGMENT_ELEMENTS = 1 << 18
"""The default length of a segment: 1 MiB of float32, which hides a latency and fits a cache."""


class Work(NamedTuple):
    """What an operation has to do, as far as its cost depends on it.

    ``elements`` is the length of the whole buffer: for all-gather and reduce-scatter the chunks of
    all ranks together, for all-to-all what one rank sends.
    """

    elements: int
    size: int
    ranks_per_node: int = 1
    segment_elements: int = SEGMENT_ELEMENTS
    tensors: int = 1

    @property
    def nodes(self) -> int:
        """How many there are; nodes are taken to be even."""
        return max(1, self.size // max(1, self.ranks_per_node))

    @property
    def chunk(self) -> int:
        """Elements of the largest of N chunks."""
        return -(-self.elements // self.size)


class Cost(NamedTuple):
    """What an algorithm costs the busiest rank; exact where chunks are of equal length.

    Local steps and elements stay within a node, where the algorithm knows about nodes; the others
    cross it.
    """

    steps: int
    """Messages that wait for one another, on the longest chain; segments count once."""
    messages: int
    """Messages that this rank sends, local ones included."""
    sent: int
    """Elements that this rank sends."""
    combined: int = 0
    """Elements that pass through its reduction, each input counted."""
    copied: int = 0
    """Elements that it copies from place to place."""
    crossing: int = 0
    """Elements that all ranks of a node together send to other nodes."""
    local_steps: int = 0
    local_sent: int = 0
    control_bytes: int = 0
    """Bytes sent beside the elements (Adasum's dot products)."""
    segments: int = 1
    """In how many pieces a chunk travels: one is on the wire while the one before is reduced."""
    waiting: int = 0
    """Elements that others must have sent one after another before this rank's can go or arrive."""


CostFunction = Callable[[Work], Cost]


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One entry: a schedule and its properties."""

    operation: str
    name: str
    schedule: Callable[..., Schedule]
    cost: CostFunction
    one_node: bool
    """Whether all ranks must be on one node."""
    wide: bool
    """Whether it serves kernels that need all inputs at once (``Kernel.wide``)."""
    needs: frozenset[str]
    """Keywords without a default: it cannot run where the caller has none of these."""
    takes: frozenset[str]
    """All keywords that it takes."""

    def __call__(self, *arguments: Any, **context: Any) -> Schedule:
        """The schedule for these arguments, without the context that it has no keyword for."""
        return self.schedule(
            *arguments, **{key: value for key, value in context.items() if key in self.takes}
        )


_REGISTRY: dict[str, dict[str, Algorithm]] = {}

_ScheduleFunction = TypeVar("_ScheduleFunction", bound=Callable[..., Schedule])


def register(
    operation: str, name: str, *, cost: CostFunction, wide: bool = True, one_node: bool = False
) -> Callable[[_ScheduleFunction], _ScheduleFunction]:
    """Enter the decorated schedule under ``operation`` and ``name``."""

    def enter(schedule: _ScheduleFunction) -> _ScheduleFunction:
        keywords = [
            p for p in inspect.signature(schedule).parameters.values() if p.kind is p.KEYWORD_ONLY
        ]
        _REGISTRY.setdefault(operation, {})[name] = Algorithm(
            operation=operation,
            name=name,
            schedule=schedule,
            cost=cost,
            one_node=one_node,
            wide=wide,
            needs=frozenset(p.name for p in keywords if p.default is p.empty),
            takes=frozenset(p.name for p in keywords),
        )
        return schedule

    return enter


def algorithms(operation: str) -> Mapping[str, Algorithm]:
    """All algorithms for ``operation`` by name.

    Raises:
        ArgumentError: there is no such operation.
    """
    try:
        return MappingProxyType(_REGISTRY[operation])
    except KeyError:
        known = ", ".join(operations())
        raise ArgumentError(f"no operation {operation!r}; there are: {known}") from None


def algorithm(operation: str, name: str) -> Algorithm:
    """One algorithm.

    Raises:
        ArgumentError: there is none of this name; lists those there are.
    """
    entries = algorithms(operation)
    try:
        return entries[name]
    except KeyError:
        known = ", ".join(sorted(entries))
        raise ArgumentError(f"no {operation} algorithm {name!r}; there are: {known}") from None


def operations() -> tuple[str, ...]:
    """The operations that have algorithms."""
    return tuple(sorted(_REGISTRY))
