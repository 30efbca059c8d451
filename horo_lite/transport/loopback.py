"""A transport between N ranks of one process: N engines run in one unit test without mpirun.

::

    network = LoopbackNetwork(2)
    left, right = network.endpoint(0), network.endpoint(1)
    token = left.send(array, peer=1, tag=5)

Polled like MPI: nothing moves but inside ``done`` and ``probe``. With a seed, messages arrive after
a random number of polls, which finds code that takes an order of arrival for granted.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

from horo_lite.errors import HorovodInternalError, PeerLostError
from horo_lite.interfaces import Array, Mailbox, Message, Native
from horo_lite.transport.emulation import (
    MessageMismatchError,
    carry_out_native,
    copy_bytes,
    snapshot,
)
from horo_lite.transport.mailbox import ProbedMailbox


class _Token:
    """A send or a receive under way, or a native operation."""

    __slots__ = ("buffer", "complete", "peers", "rank", "tag")

    def __init__(self, rank: int, peers: Sequence[int], tag: int, buffer: Array) -> None:
        self.rank = rank
        self.peers = peers
        self.tag = tag
        self.buffer = buffer
        self.complete = False

    def answers(self, asked: _Token) -> bool:
        """True where this send is what that receive asks for."""
        return self.rank == asked.peers[0] and self.peers[0] == asked.rank and self.tag == asked.tag


class _Space:
    """One message space: what its members, by their ranks in it, have sent and asked for."""

    def __init__(self, network: LoopbackNetwork, members: tuple[int, ...]) -> None:
        self.network = network
        self.members = members  # ranks of the network
        self.sent: list[_Token] = []  # not yet matched, in order of sending
        self.asked: list[_Token] = []
        self.matched: list[tuple[_Token, _Token]] = []
        self.natives: dict[int, dict[int, tuple[_Token, Native]]] = {}  # by tag, then by rank
        self.subspaces: list[_Space] = []

    def match(self) -> None:
        """Pair receives with sends in order; a pair is delivered by a later poll."""
        for asked in list(self.asked):
            sent = next((sent for sent in self.sent if sent.answers(asked)), None)
            if sent is None:
                continue
            if sent.buffer.nbytes != asked.buffer.nbytes:
                raise MessageMismatchError(
                    f"rank {sent.rank} sent {sent.buffer.nbytes} bytes with tag {sent.tag} "
                    f"to rank {asked.rank}, which asked for {asked.buffer.nbytes}"
                )
            self.sent.remove(sent)
            self.asked.remove(asked)
            self.matched.append((sent, asked))

    def deliver(self) -> None:
        """Move the data of matched pairs: of all, or with a seed of some."""
        self.match()
        waiting = []
        for sent, asked in self.matched:
            if self.network.holds_back():
                waiting.append((sent, asked))
                continue
            if sent.buffer.nbytes:
                copy_bytes(asked.buffer, sent.buffer)
            sent.complete = asked.complete = True
        self.matched = waiting


class LoopbackNetwork:
    """N ranks in this process.

    Args:
        size: how many.
        eager_bytes: sends up to this size complete before they are received, as with MPI.
        seed: delays deliveries at random; None delivers at the first poll.
    """

    def __init__(self, size: int, *, eager_bytes: int = 1024, seed: int | None = None) -> None:
        self.size = size
        self.eager_bytes = eager_bytes
        # Engines under test may have threads of their own, and each holds only its own progress
        # lock.
        self.lock = threading.RLock()
        self.lost: set[int] = set()
        self._random = random.Random(seed) if seed is not None else None
        self._world = _Space(self, tuple(range(size)))

    def endpoint(self, rank: int) -> LoopbackEndpoint:
        """The transport of one rank."""
        return LoopbackEndpoint(self._world, rank)

    def kill(self, rank: int) -> None:
        """From now on, who waits for ``rank`` gets PeerLostError."""
        self.lost.add(rank)

    def holds_back(self) -> bool:
        """Whether a delivery waits for another poll."""
        return self._random is not None and self._random.random() < 0.5


class LoopbackEndpoint:
    """One rank's end of a message space; a ``Transport``."""

    max_tag = (1 << 28) - 1

    def __init__(self, space: _Space, rank: int) -> None:
        self._space = space
        self._lock = space.network.lock
        self.rank = rank
        self.size = len(space.members)
        self._subgroups = 0
        self.sent_bytes = 0
        self._open = True
        self._tokens: list[_Token] = []

    def send(self, buffer: Array, peer: int, tag: int, whole: bool = False) -> _Token:
        """Begin to send."""
        with self._lock:
            self.sent_bytes += buffer.nbytes
            token = self._begin((peer,), tag, buffer)
            if buffer.nbytes <= self._space.network.eager_bytes:
                token.buffer = snapshot(buffer)
                token.complete = True
            self._space.sent.append(token)
            return token

    def recv(self, buffer: Array, peer: int, tag: int, whole: bool = False) -> _Token:
        """Begin to receive."""
        with self._lock:
            token = self._begin((peer,), tag, buffer)
            self._space.asked.append(token)
            return token

    def native(self, instruction: Native, tag: int) -> _Token:
        """Begin an operation of the library; the last member to begin carries it out for all."""
        with self._lock:
            token = self._begin(range(self.size), tag, instruction.buffer)
            entered = self._space.natives.setdefault(tag, {})
            if self.rank in entered:
                raise HorovodInternalError(
                    f"rank {self.rank} began a second native operation with tag {tag}"
                )
            entered[self.rank] = (token, instruction)
            if len(entered) == self.size:
                del self._space.natives[tag]
                carry_out_native([(rank, native) for rank, (_, native) in entered.items()])
                for finished, _ in entered.values():
                    finished.complete = True
            return token

    def done(self, tokens: Sequence[_Token]) -> bool:
        """Whether all are complete.

        Raises:
            PeerLostError: one is not and cannot be, as its peer was killed.
        """
        with self._lock:
            self._space.deliver()
            pending = [token for token in tokens if not token.complete]
            lost = self._space.network.lost
            for peer in [peer for token in pending for peer in token.peers]:
                if self._space.members[peer] in lost:
                    raise PeerLostError(f"rank {self.rank} waits for rank {peer}, which is lost")
            return not pending

    def probe(self, tag: int | None = None) -> Message | None:
        """The first message for this rank that no receive asked for."""
        with self._lock:
            self._space.match()
            for sent in self._space.sent:
                if sent.peers[0] == self.rank and tag in (None, sent.tag):
                    return Message(sent.rank, sent.tag, sent.buffer.nbytes)
            return None

    def abandon(self, receives: Sequence[_Token], others: Sequence[_Token]) -> None:
        """Nothing to do: spaces are not used again, and tokens hold their memory."""

    def mailbox(self, tag: int, capacity: int) -> Mailbox:
        """Short messages on a tag of their own."""
        return ProbedMailbox(self, tag, capacity)

    def subgroup(self, ranks: Sequence[int]) -> LoopbackEndpoint | None:
        """The n-th call on each rank makes, or joins, the n-th subgroup; nobody waits."""
        with self._lock:
            space, ordinal = self._space, self._subgroups
            self._subgroups += 1
            members = tuple(space.members[rank] for rank in ranks)
            if ordinal == len(space.subspaces):
                space.subspaces.append(_Space(space.network, members))
            subspace = space.subspaces[ordinal]
            if subspace.members != members:
                raise HorovodInternalError(
                    f"rank {self.rank} makes a subgroup of {members}, "
                    f"another rank of {subspace.members}"
                )
            me = space.members[self.rank]
            return LoopbackEndpoint(subspace, members.index(me)) if me in members else None

    def close(self) -> None:
        """Give the message space back.

        Raises:
            HorovodInternalError: something is still under way.
        """
        with self._lock:
            self._space.deliver()
            pending = [token for token in self._tokens if not token.complete]
            if pending:
                raise HorovodInternalError(
                    f"rank {self.rank} closes its transport with {len(pending)} operations open"
                )
            self._open = False

    def _begin(self, peers: Sequence[int], tag: int, buffer: Array) -> _Token:
        if not self._open:
            raise HorovodInternalError(f"rank {self.rank} uses a transport that was closed")
        if not 0 <= tag <= self.max_tag or not all(0 <= peer < self.size for peer in peers):
            raise HorovodInternalError(f"no such peer or tag: {peers}, {tag}")
        token = _Token(self.rank, peers, tag, buffer)
        self._tokens = [earlier for earlier in self._tokens if not earlier.complete]
        self._tokens.append(token)
        return token
