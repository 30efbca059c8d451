"""Groups of ranks that exchange among themselves, and what this rank has of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from horo_lite.engine import NamedLane, PlannedLane
from horo_lite.errors import ArgumentError, ArgumentTypeError, NotInitializedError


@dataclasses.dataclass
class Member:
    """This rank's part of one registered process set; without a lane when it is no member.

    Attributes:
        ranks: the global rank of each member.
        rank: this rank's global one.
    """

    ranks: tuple[int, ...]
    rank: int
    lane: NamedLane | None = None
    planned: PlannedLane | None = None
    states: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def lanes(self) -> list[NamedLane | PlannedLane]:
        """Its lanes; none when this rank is no member."""
        return [lane for lane in (self.lane, self.planned) if lane is not None]

    def state_of(self, name: str) -> dict[str, Any]:
        """What a compressor keeps under this name from one plain call to the next."""
        return self.states.setdefault(name, {})


class ProcessSet:
    """A group of ranks that exchange among themselves.

    Args:
        ranks_or_comm: global ranks (sorted and made unique), or an mpi4py communicator.

    Make it before ``init()`` and pass it there (``init(process_sets=[...])``), or register it later on all ranks with
    ``add_process_set`` (``init(process_sets="dynamic")``).
    """

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        self.process_set_id: int | None = None
        self.mpi_comm: Any = None
        self.ranks: list[int] | None = None
        self._member: Member | None = None
        if hasattr(ranks_or_comm, "Get_rank"):
            self.mpi_comm = ranks_or_comm
            return
        ranks = list(ranks_or_comm)
        if not all(isinstance(rank, int) for rank in ranks):
            raise ArgumentTypeError(f"a process set is made of global ranks (int), got {ranks}")
        self.ranks = sorted(set(ranks))

    def member(self) -> Member:
        """What this rank has of the set; for the front ends."""
        if self._member is not None:
            return self._member
        if self.process_set_id == 0:
            raise NotInitializedError()
        raise ArgumentError(
            f"{self} is not registered: pass it to init(process_sets=[...]) or to add_process_set()"
        )

    def register(self, number: int, member: Member) -> None:
        """Called when it becomes known under this number."""
        self.process_set_id, self.ranks, self._member = number, list(member.ranks), member

    def forget(self) -> None:
        """Called when it is known no longer; the global one keeps its number."""
        self.process_set_id, self._member = (0 if self.process_set_id == 0 else None), None

    def included(self) -> bool:
        """True on the ranks of this set."""
        return self.rank() >= 0

    def size(self) -> int:
        """The number of its ranks."""
        return len(self.member().ranks)

    def rank(self) -> int:
        """The caller's place in this set, -1 when it is no member."""
        member = self.member()
        return member.ranks.index(member.rank) if member.rank in member.ranks else -1

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSet:
        return self  # a copied optimizer exchanges with the same ranks

    def __reduce__(self) -> Any:
        return (_unpickled, (self.process_set_id == 0, self.ranks))

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def _unpickled(is_global: bool, ranks: list[int]) -> ProcessSet:
    """In another process or a later run: a set of the same ranks, to be registered there."""
    return global_process_set if is_global else ProcessSet(ranks)
