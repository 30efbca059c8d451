"""Runners that need no mpirun: all ranks live in this process."""

from __future__ import annotations

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
