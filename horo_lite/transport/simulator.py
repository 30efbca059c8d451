"""Runs the schedules of N virtual ranks in one thread, in virtual time, with exact results.

::

    simulator = Simulator(4, NetworkModel(ranks_per_node=2))
    kernel = simulator.timed(kernel)                          # optional: charges arithmetic
    group = functools.partial(Group.whole, size=4)
    outcome = simulator.run(lambda rank: ring_allreduce(group(rank), buffers[rank], kernel))
    outcome.elapsed_s, outcome.sent_bytes[0], outcome.messages[0]

Discrete events: the rank with the earliest clock goes on until it has to wait. A message's data is
copied and its arrival computed when both sides have posted it (or, if it is eager, when it is
sent). It takes about 5 us per instruction.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from horo_lite.errors import PeerLostError
from horo_lite.interfaces import (
    Array,
    Exchange,
    Instruction,
    Kernel,
    Native,
    Recv,
    Schedule,
    Send,
    Wait,
)
from horo_lite.transport.emulation import (
    DeadlockError,
    MessageMismatchError,
    carry_out_native,
    copy_bytes,
    snapshot,
)
from horo_lite.transport.network_model import NetworkModel, Ports
from horo_lite.transport.timed_kernel import TimedKernel

Program = Callable[[int], "Schedule | None"]
"""Makes a rank's schedule; None for a rank that takes no part."""


class Message(NamedTuple):
    """A message that was sent, in virtual time."""

    source: int
    target: int
    size_bytes: int
    start_s: float
    """The sender's port began to send it."""
    arrival_s: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run gave and what it cost, by rank."""

    results: list[Any]
    """What each schedule returned."""
    finish_s: list[float]
    messages: list[int]
    """Messages sent."""
    sent_bytes: list[int]
    combined_bytes: list[int]
    """Bytes that went through a timed kernel's reductions."""
    crossing_bytes: list[int]
    """Bytes that left each node."""

    @property
    def elapsed_s(self) -> float:
        return max(self.finish_s)


class _Half:
    """One side of a message: what a Send or Recv posted, and the token that its yield returns."""

    __slots__ = ("arrival_s", "buffer", "done_s", "peer", "posted_s", "rank", "sends", "waiter")

    def __init__(self, rank: int, buffer: Array, peer: int, posted_s: float, sends: bool) -> None:
        self.rank = rank
        self.buffer = buffer
        self.peer = peer
        self.posted_s = posted_s
        self.sends = sends
        self.done_s: float | None = None
        self.arrival_s: float | None = None  # of an eager message that was sent before it was asked for
        self.waiter: _Rank | None = None

    def describe(self) -> str:
        """For the report of a deadlock."""
        size_bytes = self.buffer.nbytes
        if self.sends:
            return f"rank {self.peer} to receive {size_bytes} bytes"
        return f"{size_bytes} bytes from rank {self.peer}"


def _ended(_: Any) -> Instruction:
    """What a rank without a schedule has to do."""
    raise StopIteration


class _Rank:
    """One virtual rank."""

    __slots__ = ("clock", "instruction", "missing", "name", "resume", "state", "waits")

    def __init__(self, name: int, schedule: Schedule | None, clock: float) -> None:
        self.name = name
        self.resume: Callable[[Any], Instruction] = schedule.send if schedule is not None else _ended
        self.clock = clock
        self.instruction: Instruction | None = None  # fetched, but the others have to catch up first
        self.waits: Sequence[_Half] = ()
        self.missing = 0
        self.state = "runs" if schedule is not None else "finished"


class Simulator:
    """N virtual ranks on a network model. One object may run one program after another.

    Args:
        watch: is told of each message as it is sent.
    """

    def __init__(
        self,
        size: int,
        network: NetworkModel | None = None,
        watch: Callable[[Message], None] | None = None,
    ) -> None:
        self.size = size
        self.watch = watch
        self.network = network if network is not None else NetworkModel()
        self._running: _Rank | None = None
        self._combined_bytes = [0] * size

    def timed(self, kernel: Kernel) -> Kernel:
        """``kernel`` with its arithmetic charged to whichever virtual rank calls it."""
        return TimedKernel(kernel, self.network, self.charge)

    def charge(self, seconds: float, combined_bytes: int = 0) -> None:
        """Let virtual time pass on the rank that is running (for a schedule's own computation)."""
        rank = self._running
        if rank is not None:
            rank.clock += seconds * self.network.slowdown.get(rank.name, 1.0)
            self._combined_bytes[rank.name] += combined_bytes

    def run(self, program: Program) -> Outcome:
        """Run ``program(rank)`` on every rank to its end.

        Raises:
            DeadlockError: no rank can go on.
            PeerLostError: no rank can go on, as the network has lost a rank or a link.
            MessageMismatchError: lengths differ, or a message was left over.
        """
        self._combined_bytes = [0] * self.size
        run = _Run(self, program)
        try:
            run.loop()
        finally:
            self._running = None
        return Outcome(
            run.results,
            [rank.clock for rank in run.ranks],
            run.messages,
            run.sent_bytes,
            self._combined_bytes,
            run.ports.crossing_bytes,
        )


class _Run:
    """The state of one run."""

    def __init__(self, simulator: Simulator, program: Program) -> None:
        network, size = simulator.network, simulator.size
        self.simulator = simulator
        self.network = network
        self.size = size
        self.ranks = [
            _Rank(rank, program(rank), network.late_s.get(rank, 0.0)) for rank in range(size)
        ]
        self.results: list[Any] = [None] * size
        self.messages = [0] * size
        self.sent_bytes = [0] * size
        self.ports = Ports(network, size)
        # Unmatched halves by channel (sender and receiver as one number): all sends or all receives.
        self.posted: dict[int, deque[_Half]] = {}
        self.natives: list[tuple[_Rank, Native]] = []
        self.ready = [(rank.clock, rank.name) for rank in self.ranks if rank.state == "runs"]
        heapq.heapify(self.ready)
        self.faulty = bool(network.dead_s or network.cut_s)

    def loop(self) -> None:
        """Let the rank with the earliest clock go on, until none can."""
        ready, ranks = self.ready, self.ranks
        while ready:
            rank = ranks[heapq.heappop(ready)[1]]
            if self.faulty and rank.clock >= self.network.dead_s.get(rank.name, float("inf")):
                rank.state = "dead"
                continue
            self.simulator._running = rank
            self.advance(rank)
        self.check_end()

    def advance(self, rank: _Rank) -> None:
        """Carry out a rank's instructions until it waits, ends, or is ahead of another rank."""
        ready, resume = self.ready, rank.resume
        instruction, reply = rank.instruction, None
        rank.instruction = None
        while True:
            if instruction is None:
                try:
                    instruction = resume(reply)
                except StopIteration as stop:
                    self.results[rank.name] = stop.value
                    rank.state = "finished"
                    return
                # Ports are given out in the order of virtual time: whoever is earlier goes first.
                if ready and ready[0][0] < rank.clock:
                    rank.instruction = instruction
                    heapq.heappush(ready, (rank.clock, rank.name))
                    return
            if isinstance(instruction, Send):
                reply = self.post(rank, instruction.buffer, instruction.peer, True)
            elif isinstance(instruction, Recv):
                reply = self.post(rank, instruction.buffer, instruction.peer, False)
            elif isinstance(instruction, Native):
                self.enter_native(rank, instruction)
                return
            elif self.wait(rank, self.tokens(rank, instruction)):
                reply = None
            else:
                return
            instruction = None

    def tokens(self, rank: _Rank, instruction: Wait | Exchange) -> Sequence[_Half]:
        """What a Wait or an Exchange waits for."""
        if isinstance(instruction, Wait):
            return instruction.tokens
        if isinstance(instruction, Exchange):
            incoming = self.post(rank, instruction.incoming, instruction.src, False)
            return incoming, self.post(rank, instruction.outgoing, instruction.dst, True)
        raise TypeError(f"rank {rank.name} yielded {instruction!r}, which is no instruction")

    def wait(self, rank: _Rank, tokens: Sequence[_Half]) -> bool:
        """Move the clock to the end of all tokens, or let the last of them wake the rank."""
        missing, clock = 0, rank.clock
        for half in tokens:
            done_s = half.done_s
            if done_s is None:
                half.waiter = rank
                missing += 1
            elif done_s > clock:
                clock = done_s
        rank.clock = clock
        rank.missing, rank.waits = missing, tokens
        return not missing

    def finish(self, half: _Half, done_s: float) -> None:
        """Complete one side of a message and wake who waits for it."""
        half.done_s = done_s
        rank = half.waiter
        if rank is not None:
            if done_s > rank.clock:
                rank.clock = done_s
            rank.missing -= 1
            if not rank.missing:
                heapq.heappush(self.ready, (rank.clock, rank.name))

    def post(self, rank: _Rank, buffer: Array, peer: int, sends: bool) -> _Half:
        """Post one side of a message; the second side to come moves the data."""
        me = rank.name
        half = _Half(me, buffer, peer, rank.clock, sends)
        if sends:
            self.messages[me] += 1
            self.sent_bytes[me] += buffer.nbytes
            channel = me * self.size + peer
        else:
            channel = peer * self.size + me
        queue = self.posted.get(channel)
        if queue is not None and queue[0].sends is not sends:
            other = queue.popleft()
            if not queue:
                del self.posted[channel]
            if sends:
                self.match(half, other)
            else:
                self.match(other, half)
            return half
        if sends and buffer.nbytes <= self.network.eager_bytes:
            arrival_s = self.transfer(half, rank.clock)
            if arrival_s is not None:
                half.buffer = snapshot(buffer)
                half.arrival_s = arrival_s
        if queue is None:
            self.posted[channel] = deque((half,))
        else:
            queue.append(half)
        return half

    def match(self, send: _Half, recv: _Half) -> None:
        """Both sides are posted: move the data and say when each is done."""
        outgoing, incoming = send.buffer, recv.buffer
        if outgoing.nbytes != incoming.nbytes:
            raise MessageMismatchError(
                f"rank {send.rank} sent {outgoing.nbytes} bytes to rank {recv.rank}, "
                f"which asked for {incoming.nbytes}"
            )
        overhead_s = self.network.overhead_s
        if send.arrival_s is not None:
            arrival_s: float | None = max(send.arrival_s, recv.posted_s)
        else:
            arrival_s = self.transfer(send, max(send.posted_s, recv.posted_s))
        if arrival_s is None:
            return
        if outgoing.nbytes:
            copy_bytes(incoming, outgoing)
        self.finish(recv, arrival_s + overhead_s)

    def transfer(self, send: _Half, start_s: float) -> float | None:
        """Occupy the ports; returns when the message arrives, None if it is lost."""
        network = self.network
        start_s += network.overhead_s
        if self.faulty and start_s >= network.cut_s.get((send.rank, send.peer), float("inf")):
            return None
        size_bytes = send.buffer.nbytes
        start_s, left_s, arrival_s = self.ports.occupy(send.rank, send.peer, size_bytes, start_s)
        self.finish(send, left_s)
        if self.simulator.watch is not None:
            self.simulator.watch(Message(send.rank, send.peer, size_bytes, start_s, arrival_s))
        return arrival_s

    def enter_native(self, rank: _Rank, instruction: Native) -> None:
        """The last rank to enter carries out what the MPI library would have done."""
        rank.state = "in a native operation"
        self.natives.append((rank, instruction))
        if len(self.natives) < self.size:
            return
        members, self.natives = self.natives, []
        carry_out_native([(member.name, native) for member, native in members])
        start_s = max(member.clock for member, _ in members)
        steps = 2 * (self.size - 1).bit_length()
        wire_s = 2 * instruction.buffer.nbytes / self.network.bandwidth * (self.size - 1) / self.size
        for member, _ in members:
            member.state = "runs"
            member.clock = start_s + steps * self.network.latency_s + wire_s
            heapq.heappush(self.ready, (member.clock, member.name))

    def check_end(self) -> None:
        """All ranks must have ended and all messages must have been received."""
        stuck = [rank for rank in self.ranks if rank.state not in ("finished", "dead")]
        if stuck:
            text = "; ".join(_describe(rank) for rank in self.ranks)
            raise (PeerLostError if self.faulty else DeadlockError)(f"no rank can go on: {text}")
        if self.faulty:
            return
        for queue in self.posted.values():
            half = queue[0]
            verb, joint = ("sent", "to") if half.sends else ("posted a receive of", "from")
            raise MessageMismatchError(
                f"rank {half.rank} {verb} {half.buffer.nbytes} bytes {joint} rank {half.peer}, "
                "for which there is no other side"
            )


def _describe(rank: _Rank) -> str:
    waits = [half.describe() for half in rank.waits if half.done_s is None]
    if rank.state == "runs" and waits:
        return f"rank {rank.name} waits for {' and '.join(waits)}"
    return f"rank {rank.name} is {rank.state}"
