"""The transport between ranks of one process keeps the contract of ``interfaces.Transport``."""

from __future__ import annotations

import numpy as np
import pytest

from horo_lite.errors import HorovodInternalError, PeerLostError
from horo_lite.interfaces import Message, Native, Reduction
from horo_lite.transport.emulation import MessageMismatchError
from horo_lite.transport.loopback import LoopbackNetwork


def pair(**options: object) -> tuple[LoopbackNetwork, list]:
    network = LoopbackNetwork(2, **options)
    return network, [network.endpoint(rank) for rank in range(2)]


def test_a_large_send_is_done_when_it_was_received() -> None:
    _, (left, right) = pair(eager_bytes=8)
    sent = left.send(np.arange(4.0), 1, 5)
    assert not left.done([sent])
    incoming = np.zeros(4)
    received = right.recv(incoming, 0, 5)
    assert right.done([received])
    assert left.done([sent])
    np.testing.assert_array_equal(incoming, np.arange(4.0))


def test_a_small_send_is_done_at_once_and_its_buffer_may_change() -> None:
    _, (left, right) = pair()
    outgoing = np.array([7])
    assert left.done([left.send(outgoing, 1, 5)])
    outgoing[0] = 8
    incoming = np.zeros(1, int)
    assert right.done([right.recv(incoming, 0, 5)])
    assert incoming[0] == 7


def test_messages_of_one_tag_keep_their_order_and_tags_are_apart() -> None:
    _, (left, right) = pair(seed=1)
    for value, tag in ((1, 5), (2, 6), (3, 5)):
        left.send(np.array([value]), 1, tag)
    values = np.zeros((3, 1), int)
    tokens = [right.recv(values[i], 0, tag) for i, tag in enumerate((6, 5, 5))]
    while not right.done(tokens):
        pass
    assert values.ravel().tolist() == [2, 1, 3]


def test_probe_shows_the_first_message_that_nobody_asked_for() -> None:
    _, (left, right) = pair()
    assert right.probe() is None
    left.send(np.zeros(2), 1, 5)
    left.send(np.zeros(3), 1, 6)
    assert right.probe() == Message(0, 5, 16)
    assert right.probe(6) == Message(0, 6, 24)
    right.recv(np.zeros(2), 0, 5)
    assert right.probe() == Message(0, 6, 24)
    assert left.probe() is None


def test_native_operations_complete_when_all_have_entered() -> None:
    _, ends = pair()
    values = [np.array([1.0, 5.0]), np.array([2.0, 3.0])]
    first = ends[0].native(Native("allreduce", values[0], Reduction.MAX, 0), 9)
    assert not ends[0].done([first])
    second = ends[1].native(Native("allreduce", values[1], Reduction.MAX, 0), 9)
    assert ends[0].done([first]) and ends[1].done([second])
    assert values[0].tolist() == values[1].tolist() == [2.0, 5.0]


def test_a_subgroup_is_a_message_space_of_its_own_in_its_own_order() -> None:
    network = LoopbackNetwork(3)
    world = [network.endpoint(rank) for rank in range(3)]
    group = [end.subgroup((2, 0)) for end in world]
    assert group[1] is None
    assert [(group[rank].rank, group[rank].size) for rank in (0, 2)] == [(1, 2), (0, 2)]
    world[0].send(np.array([1]), 2, 5)
    group[0].send(np.array([2]), 0, 5)
    incoming = np.zeros(1, int)
    assert group[2].done([group[2].recv(incoming, 1, 5)])
    assert incoming[0] == 2
    with pytest.raises(HorovodInternalError, match="makes a subgroup"):
        world[0].subgroup((0, 1))
        world[1].subgroup((0, 2))


def test_a_lost_peer_is_reported_to_who_waits_for_it() -> None:
    network, (left, _) = pair()
    token = left.recv(np.zeros(1), 1, 5)
    assert not left.done([token])
    network.kill(1)
    with pytest.raises(PeerLostError, match="rank 0 waits for rank 1"):
        left.done([token])


def test_lengths_that_differ_are_an_error() -> None:
    _, (left, right) = pair()
    left.send(np.zeros(2), 1, 5)
    with pytest.raises(MessageMismatchError, match=r"rank 0 sent 16 bytes .* asked for 24"):
        right.done([right.recv(np.zeros(3), 0, 5)])


def test_closing_with_something_under_way_is_an_error() -> None:
    _, (left, right) = pair()
    token = left.recv(np.zeros(1), 1, 5)
    with pytest.raises(HorovodInternalError, match="1 operations open"):
        left.close()
    right.send(np.zeros(1), 0, 5)
    assert left.done([token])
    left.close()
    with pytest.raises(HorovodInternalError, match="closed"):
        left.send(np.zeros(1), 1, 5)


def test_with_a_seed_messages_come_late_but_come() -> None:
    _, (left, right) = pair(seed=3)
    polls = 0
    for value in range(50):
        incoming = np.zeros(1, int)
        token = right.recv(incoming, 0, 5)
        left.send(np.array([value]), 1, 5)
        while not right.done([token]):
            polls += 1
        assert incoming[0] == value
    assert polls > 10
