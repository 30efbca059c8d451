"""The simulator: virtual time by hand arithmetic, faults, and what it says when a schedule is
wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from horo_lite.collectives import algorithm
from horo_lite.errors import PeerLostError
from horo_lite.interfaces import Exchange, Group, Recv, Schedule, Send, Wait
from horo_lite.transport.emulation import DeadlockError, MessageMismatchError
from horo_lite.transport.network_model import NetworkModel
from horo_lite.transport.simulator import Outcome, Program, Simulator
from tests.contracts.reference_kernel import ReferenceKernel

NETWORK = NetworkModel(
    latency_s=5.0,
    bandwidth=100.0,
    local_latency_s=1.0,
    local_bandwidth=1000.0,
    overhead_s=0.0,
    eager_bytes=0,
    reduce_rate=50.0,
    copy_rate=50.0,
)


def simulate(size: int, program: Program, **changes: object) -> Outcome:
    return Simulator(size, dataclasses.replace(NETWORK, **changes)).run(program)


def one_message(nbytes: int, sender_late_s: float = 0.0) -> Program:
    """Rank 0 sends to rank 1."""

    def program(rank: int) -> Schedule:
        buffer = np.full(nbytes, 5 + rank, np.uint8)
        token = yield Send(buffer, 1) if rank == 0 else Recv(buffer, 0)
        yield Wait((token,))
        return int(buffer[0])

    return program


def test_a_message_takes_latency_and_bytes_by_bandwidth() -> None:
    outcome = simulate(2, one_message(200))
    assert outcome.finish_s == [2.0, 7.0]  # the sender's port is free before the last byte arrives
    assert outcome.results == [5, 5]
    assert outcome.messages == [1, 0]
    assert outcome.sent_bytes == [200, 0]


def test_within_a_node_it_takes_the_node_s_latency_and_bandwidth() -> None:
    assert simulate(2, one_message(200), ranks_per_node=2).finish_s == [0.2, 1.2]


def test_the_processor_s_overhead_is_charged_on_either_side() -> None:
    assert simulate(2, one_message(200), overhead_s=0.25).finish_s == [2.25, 7.5]


def test_a_large_message_waits_for_its_receiver_and_a_small_one_does_not() -> None:
    late = {1: 10.0}
    assert simulate(2, one_message(200), late_s=late).finish_s == [12.0, 17.0]
    assert simulate(2, one_message(200), late_s=late, eager_bytes=200).finish_s == [2.0, 10.0]


def pairs(rank: int) -> Schedule:
    """Ranks 0 and 1 send 100 bytes each to ranks 2 and 3."""
    buffer = np.zeros(100, np.uint8)
    token = yield Send(buffer, rank + 2) if rank < 2 else Recv(buffer, rank - 2)
    yield Wait((token,))


def test_ranks_of_a_node_share_its_port() -> None:
    assert simulate(4, pairs).finish_s == [1.0, 1.0, 6.0, 6.0]
    assert simulate(4, pairs, ranks_per_node=2).finish_s == [1.0, 2.0, 6.0, 7.0]
    uneven = ((0,), (1,), (2, 3))
    assert simulate(4, pairs, nodes=uneven).finish_s == [1.0, 1.0, 6.0, 7.0]


def test_arithmetic_is_charged_to_the_rank_that_does_it() -> None:
    simulator = Simulator(2, dataclasses.replace(NETWORK, slowdown={1: 3.0}))
    kernel = simulator.timed(ReferenceKernel(np.uint8))

    def program(rank: int) -> Schedule:
        buffer = np.ones(50, np.uint8)
        kernel.combine(buffer, (buffer, buffer))  # 100 bytes of input at 50 a second
        kernel.copy(buffer, buffer)
        kernel.blend(buffer, buffer, 1.0, buffer, 1.0)
        kernel.inner(buffer, buffer)
        return
        yield

    outcome = simulator.run(program)
    assert outcome.finish_s == [7.0, 21.0]
    assert outcome.combined_bytes == [100, 100]


def allreduce(simulator: Simulator, name: str, elements: int, **context: object) -> Outcome:
    size = simulator.size
    buffers = [np.full(elements, rank, np.float32) for rank in range(size)]
    kernel = simulator.timed(ReferenceKernel(np.float32))
    entry = algorithm("allreduce", name)
    outcome = simulator.run(
        lambda rank: entry(Group.whole(rank, size), buffers[rank], kernel, **context)
    )
    assert all((buffer == size * (size - 1) // 2).all() for buffer in buffers)
    return outcome


def test_a_large_ring_takes_the_ring_bound() -> None:
    network = NetworkModel(bandwidth=12.5e6, latency_s=100e-6)
    elements = 1 << 20
    outcome = allreduce(Simulator(4, network), "ring", elements, segment_elements=1 << 16)
    bound_s = 2 * 3 / 4 * 4 * elements / 12.5e6
    assert bound_s < outcome.elapsed_s < 1.05 * bound_s


def test_a_ring_of_segments_reduces_while_it_receives() -> None:
    network = NetworkModel(reduce_rate=4e9, bandwidth=2e9)  # as long to reduce as to receive
    elements = 1 << 21
    whole = allreduce(Simulator(4, network), "ring", elements, segment_elements=elements)
    segments = allreduce(Simulator(4, network), "ring", elements, segment_elements=1 << 15)
    reducing_s = 2 * 3 / 4 * 4 * elements / network.reduce_rate
    assert whole.elapsed_s - segments.elapsed_s > 0.8 * reducing_s


def test_two_ranks_a_node_take_no_longer_than_one() -> None:
    elements = 1 << 20
    network = NetworkModel(bandwidth=12.5e6)
    one = allreduce(Simulator(4, network), "ring", elements, segment_elements=1 << 16)
    nodes = [(0, 1), (2, 3), (4, 5), (6, 7)]
    pairs_of_ranks = Simulator(8, dataclasses.replace(network, ranks_per_node=2))
    two = allreduce(pairs_of_ranks, "hierarchical", elements, nodes=nodes, segment_elements=1 << 16)
    assert two.elapsed_s < 1.05 * one.elapsed_s


def test_a_straggler_delays_all() -> None:
    plain = allreduce(Simulator(4, NETWORK), "ring", 64)
    late = allreduce(Simulator(4, dataclasses.replace(NETWORK, late_s={2: 100.0})), "ring", 64)
    assert late.elapsed_s > plain.elapsed_s + 90


def test_a_dead_rank_is_named() -> None:
    network = dataclasses.replace(NETWORK, dead_s={2: 3.0})
    with pytest.raises(PeerLostError, match=r"rank 1 waits for .*rank 2 is dead"):
        allreduce(Simulator(4, network), "ring", 64)


def test_a_cut_link_is_reported_by_who_waits_for_it() -> None:
    network = dataclasses.replace(NETWORK, cut_s={(0, 1): 1.0})

    def program(rank: int) -> Schedule:
        """Two messages; the first gets through."""
        buffer = np.zeros(400, np.uint8)
        for _ in range(2):
            token = yield Send(buffer, 1) if rank == 0 else Recv(buffer, 0)
            yield Wait((token,))

    with pytest.raises(PeerLostError, match="rank 1 waits for 400 bytes from rank 0"):
        Simulator(2, network).run(program)


def test_a_deadlock_says_who_waits_for_what() -> None:
    def program(rank: int) -> Schedule:
        buffer = np.zeros(3, np.uint8)
        if rank < 2:
            yield Wait(((yield Recv(buffer, 1 - rank)),))

    with pytest.raises(
        DeadlockError,
        match=r"rank 0 waits for 3 bytes from rank 1; rank 1 waits for 3 bytes from rank 0; rank 2 is finished",
    ):
        simulate(3, program)


def test_sends_that_nobody_takes_deadlock_unless_they_are_eager() -> None:
    def program(rank: int) -> Schedule:
        buffer = np.zeros(3, np.uint8)
        yield Wait(((yield Send(buffer, 1 - rank)),))
        yield Wait(((yield Recv(buffer, 1 - rank)),))

    with pytest.raises(DeadlockError, match="rank 0 waits for rank 1 to receive 3 bytes"):
        simulate(2, program)
    simulate(2, program, eager_bytes=3)


def test_an_eager_message_is_what_it_was_when_it_was_sent() -> None:
    def program(rank: int) -> Schedule:
        buffer = np.array([7], np.uint8)
        if rank == 0:
            yield Wait(((yield Send(buffer, 1)),))
            buffer[0] = 8
            return None
        yield Wait(((yield Recv(buffer, 0)),))
        return int(buffer[0])

    assert simulate(2, program, eager_bytes=1, late_s={1: 9.0}).results == [None, 7]


def test_lengths_that_differ_are_an_error() -> None:
    def program(rank: int) -> Schedule:
        buffer = np.zeros(3 + rank)
        yield Exchange(buffer, 1 - rank, buffer, 1 - rank)

    with pytest.raises(MessageMismatchError, match="sent 24 bytes to rank 1, which asked for 32"):
        simulate(2, program)


def test_a_message_that_is_left_over_is_an_error() -> None:
    def program(rank: int) -> Schedule:
        if rank == 0:
            yield Send(np.zeros(3), 1)

    for eager_bytes in (0, 100):
        with pytest.raises(MessageMismatchError, match="rank 0 sent 24 bytes to rank 1"):
            simulate(2, program, eager_bytes=eager_bytes)


def test_what_is_no_instruction_is_named() -> None:
    def program(rank: int) -> Schedule:
        yield "send"

    with pytest.raises(TypeError, match="rank 0 yielded 'send'"):
        simulate(1, program)


def test_the_same_run_takes_the_same_time() -> None:
    network = NetworkModel(ranks_per_node=2)
    runs = {allreduce(Simulator(6, network), "halving_doubling", 999).elapsed_s for _ in range(3)}
    assert len(runs) == 1
