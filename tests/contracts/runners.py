"""Runners for the contract bodies: two where all ranks live in this process, one for a
transport."""

from __future__ import annotations

from horo_lite.interfaces import Transport
from horo_lite.transport import driver
from horo_lite.transport.interleaver import Interleaver
from horo_lite.transport.network_model import NetworkModel
from horo_lite.transport.simulator import Outcome, Program, Simulator


class SimulatedRunner:
    """Runs schedules in virtual time; ``outcome`` tells what the last one cost, with a latency of 1
    as its only cost."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks = range(size)
        self.outcome: Outcome | None = None

    def __call__(self, program: Program) -> Outcome:
        self.outcome = Simulator(self.size, NetworkModel.counting_steps()).run(program)
        return self.outcome


class InterleavedRunner:
    """Runs schedules in a random order that the seed decides."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.ranks = range(size)
        self.seed = seed

    def __call__(self, program: Program) -> None:
        Interleaver(self.size, self.seed).run(program)


class DriverRunner:
    """Runs this process's schedule on a transport, and the other processes run theirs."""

    def __init__(self, transport: Transport) -> None:
        self.size = transport.size
        self.ranks = (transport.rank,)
        self._transport = transport
        self._tag = 0

    def __call__(self, program: Program) -> None:
        # Where a schedule leaves a message behind, the next one must not take it.
        self._tag += 1
        schedule = program(self._transport.rank)
        if schedule is not None:
            driver.run(schedule, self._transport, self._tag)
