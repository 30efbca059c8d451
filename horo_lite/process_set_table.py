"""The process sets that are registered, by number: the same on all ranks, as registering is collective."""

from __future__ import annotations

from horo_lite.config import Config
from horo_lite.engine import Engine, Fabric, Instruments, NamedLane, PlannedLane
from horo_lite.errors import ArgumentError, DisagreementError
from horo_lite.interfaces import Transport
from horo_lite.process_sets import Member, ProcessSet, global_process_set
from horo_lite.transport.mpi_world import MPIWorld


class ProcessSetTable:
    """The global process set, from the start, and those that are registered beside it. Making it is collective.

    Args:
        engine: drives the lanes of those that this rank is a member of.

    Attributes:
        members: this rank's part of each process set, by its number; 0 is the global one.
    """

    def __init__(self, world: MPIWorld, engine: Engine, config: Config, instruments: Instruments) -> None:
        self._world = world
        self._engine = engine
        self._config = config
        self._instruments = instruments
        self._next_number = 1
        self._beside: dict[int, ProcessSet] = {}
        self._root = world.transport()
        everyone = self._join(tuple(range(world.size)), self._root, world.transport())
        self.members: dict[int, Member] = {0: everyone}
        global_process_set.register(0, everyone)
        global_process_set.mpi_comm = world.native_comm()

    @property
    def lanes(self) -> list[NamedLane | PlannedLane]:
        """Those of all process sets that this rank is a member of."""
        return [lane for member in self.members.values() for lane in member.lanes]

    def register(self, process_set: ProcessSet) -> None:
        """Collective over all ranks: make a process set known.

        Ranks may pass different communicators (the parts of one split): each part becomes a process set.

        Raises:
            DisagreementError: ranks passed different lists, or one of them can't take part.
            ArgumentError: not ranks of this world, or registered already.
        """
        own, groups = self._agree(process_set)
        for ranks in groups:
            if any(member.ranks == ranks for member in self.members.values()):
                raise ArgumentError(f"a process set of ranks {list(ranks)} is registered already; use that one")
        for ranks in groups:
            mine = ranks == (own or groups[0])
            self._enter(process_set if mine else ProcessSet(ranks), ranks)

    def unregister(self, process_set: ProcessSet) -> bool:
        """Collective over all ranks. False when it is not registered, or is the global one."""
        number = process_set.process_set_id
        if number not in self._beside:
            return False
        for lane in self.members.pop(number).lanes:
            self._engine.remove(lane)
            lane.transport.close()
        del self._beside[number]
        process_set.forget()
        return True

    def close(self) -> None:
        """Collective: forget all, and give their message spaces back."""
        for process_set in (global_process_set, *self._beside.values()):
            process_set.forget()
        for lane in self.lanes:
            lane.transport.close()

    def _agree(self, process_set: ProcessSet) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        """What every rank registers. Returns the ranks of this one's set, and those of all, in one order."""
        own: tuple[int, ...] = ()
        fault: Exception | None = None
        try:
            own = self._ranks_of(process_set)
        except ValueError as error:
            fault = error
        except TypeError as error:
            fault = ArgumentError(f"process set {process_set.ranks!r}: expected a list of ranks: {error}")
        listed = process_set.mpi_comm is None
        answers = self._world.allgather((own, listed, fault and str(fault)))
        if fault is not None:
            raise fault
        for rank, (_, _, text) in enumerate(answers):
            if text is not None:
                raise DisagreementError(f"rank {rank} could not register a process set: {text}")
        offers = [answer[0] for answer in answers]
        if any(answer[1] for answer in answers) and len(set(offers)) > 1:
            shown = "; ".join(f"rank {rank}: {list(offer)}" for rank, offer in enumerate(offers[:8]))
            raise DisagreementError(f"every rank must register the same process set: {shown}")
        return own, sorted({offer for offer in offers if offer})

    def _ranks_of(self, process_set: ProcessSet) -> tuple[int, ...]:
        if process_set.ranks is None:
            return self._world.ranks_of(process_set.mpi_comm)
        ranks = tuple(process_set.ranks)
        size = self._world.size
        wrong = [rank for rank in ranks if not 0 <= rank < size]
        if wrong or not ranks:
            raise ArgumentError(
                f"process set {list(ranks)}: expected global ranks from 0 to {size - 1}"
                + (f", got {wrong}" if wrong else ", got none")
            )
        return ranks

    def _enter(self, process_set: ProcessSet, ranks: tuple[int, ...]) -> None:
        named, planned = self._root.subgroup(ranks), self._root.subgroup(ranks)
        if named is None or planned is None:
            member = Member(ranks, self._world.rank)
        else:
            member = self._join(ranks, named, planned)
        process_set.register(self._next_number, member)
        self.members[self._next_number] = member
        self._beside[self._next_number] = process_set
        self._next_number += 1

    def _join(self, ranks: tuple[int, ...], named: Transport, planned: Transport) -> Member:
        """This rank's part of a set that it is a member of, with a message space for each lane."""
        shared = ranks, self._world.topology.within(ranks), self._config, self._instruments
        own = NamedLane(Fabric(named, *shared), self._engine.wake)
        member = Member(ranks, self._world.rank, own, PlannedLane(Fabric(planned, *shared, staged=False)))
        for lane in member.lanes:
            self._engine.add(lane)
        return member
