"""Several ranks in one process: their lanes in one thread, or the whole framework-free API with a thread per rank."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from horo_lite import gradients
from horo_lite.config import Config
from horo_lite.engine import Engine, Fabric, Handle, NamedLane, PlannedLane
from horo_lite.engine.instruments import Instruments
from horo_lite.engine.operations import Operation
from horo_lite.functions import all_reduce, objects, submission
from horo_lite.process_sets import Member, ProcessSet, global_process_set
from horo_lite.transport.loopback import LoopbackNetwork
from horo_lite.transport.topology import Topology

ROUNDS = 20_000  # of polls, before a test gives up


class Lanes:
    """The named and planned lanes of N ranks, polled in turn by the test's own thread."""

    def __init__(
        self,
        size: int,
        seed: int | None = None,
        config: Config | None = None,
        ranks: Sequence[int] | None = None,
        nodes: int = 1,
    ) -> None:
        self.size = size
        self.network = LoopbackNetwork(size, seed=seed)
        self.named: list[NamedLane] = []
        self.planned: list[PlannedLane] = []
        self.woken: list[int] = []
        """Ranks that have asked for another thread to poll."""
        numbers = tuple(ranks or range(size))
        for rank in range(size):
            endpoint = self.network.endpoint(rank)
            named, planned = endpoint.subgroup(range(size)), endpoint.subgroup(range(size))
            topology = Topology(rank, tuple(tuple(range(node, size, nodes)) for node in range(nodes)))
            shared = numbers, topology, config or Config(shared_memory=False), Instruments()
            self.named.append(NamedLane(Fabric(named, *shared), functools.partial(self.woken.append, rank)))
            self.planned.append(PlannedLane(Fabric(planned, *shared, staged=False)))

    def poll(self, rounds: int = 1) -> None:
        """Every lane, some rounds."""
        for _ in range(rounds):
            for lane in (*self.named, *self.planned):
                lane.progress()

    def finish(self, *handles: Handle) -> list[Any]:
        """Poll until all are finished; their results, or their errors as values."""
        for _ in range(ROUNDS):
            if all(handle.finished for handle in handles):
                return [handle.error if handle.error is not None else handle.result() for handle in handles]
            self.poll()
        waiting = [handle.name for handle in handles if not handle.finished]
        raise AssertionError(f"not finished: {waiting}")

    def ask(self, make: Callable[[int], Operation], ranks: Sequence[int] | None = None) -> list[Handle]:
        """Submit ``make(rank)`` on these ranks, in this order."""
        handles = []
        for rank in range(self.size) if ranks is None else ranks:
            operation = make(rank)
            self.named[rank].submit(operation)
            handles.append(operation.handle)
        return handles


class Threads:
    """The framework-free API on N ranks, a thread each, over a loopback network.

    ::

        def body(rank): ...functions.allreduce(...)
        results = Threads(monkeypatch, 3).run(body)
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, size: int, config: Config | None = None, seed: int | None = None
    ) -> None:
        self.size = size
        self._here = threading.local()
        for module in (all_reduce, objects, submission, gradients):
            monkeypatch.setattr(module, "current", lambda: self._here.context)
        monkeypatch.setattr(ProcessSet, "member", lambda _: self._here.context.members[0])
        network = LoopbackNetwork(size, seed=seed)
        self._contexts = [_StubContext(network, rank, config or Config()) for rank in range(size)]
        monkeypatch.setattr(global_process_set, "ranks", list(range(size)))

    def run(self, body: Callable[[int], Any], limit_s: float = 30.0) -> list[Any]:
        """``body(rank)`` in every thread; what each returned or raised."""
        results: list[Any] = [TimeoutError("not finished")] * self.size

        def main(rank: int) -> None:
            self._here.context = self._contexts[rank]
            try:
                results[rank] = body(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limit_s)
        return results

    def close(self) -> None:
        """End the engines' threads."""
        for stub in self._contexts:
            stub.engine.close()


class _StubContext:
    """What the API asks of a ``context.Context``."""

    def __init__(self, network: LoopbackNetwork, rank: int, config: Config) -> None:
        self.config, self.rank, self.size = config, rank, network.size
        self.topology = Topology(rank, (tuple(range(network.size)),))
        self.engine = Engine(spin_polls=0)
        endpoint = network.endpoint(rank)
        spaces = [endpoint.subgroup(range(network.size)) for _ in range(2)]
        shared = tuple(range(network.size)), self.topology, config, Instruments()
        lanes = NamedLane(Fabric(spaces[0], *shared)), PlannedLane(Fabric(spaces[1], *shared, staged=False))
        member = Member(tuple(range(network.size)), rank, *lanes)
        self.members = {0: member}
        for lane in member.lanes:
            self.engine.add(lane)
