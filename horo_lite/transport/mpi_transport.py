"""The transport over an MPI communicator (``interfaces.Transport``).

All messages are bytes, so no type is ever handed to MPI that it might not know (bfloat16 would be added as garbage
without an error). Messages are split where MPI's 32-bit counts end.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from horo_lite.arrays import as_bytes
from horo_lite.errors import ArgumentError, PeerLostError
from horo_lite.interfaces import Array, Mailbox, Message, Native, Reduction, Token
from horo_lite.transport import cuda
from horo_lite.transport.mailbox import PersistentMailbox
from horo_lite.transport.staging import Staged, StagedTransport
from horo_lite.transport.waiting import Backoff

_LARGEST_MESSAGE_BYTES = 1 << 30  # MPI 3 counts are 32 bits wide, and Open MPI refuses larger ones
_NO_BUFFER = (BufferError, TypeError, ValueError)  # numpy exports no bfloat16


class _Chunks:
    """The requests of one message that was split, behaving like one request."""

    __slots__ = ("requests",)

    def __init__(self, requests: list[Any]) -> None:
        self.requests = requests

    def Test(self) -> bool:
        return all([request.Test() for request in self.requests])  # noqa: C419  (each must be tested)


def _end(receive: Any) -> None:
    """Make a posted receive match nothing more."""
    for request in receive.requests if isinstance(receive, _Chunks) else (receive,):
        if not request.Test():  # a completed one cannot be cancelled
            request.Cancel()
            request.Wait()


class MPITransport:
    """An MPI communicator of our own as a transport (``interfaces.Transport``).

    Args:
        comm: the communicator; it belongs to this object from now on.
        chunk_elements: the largest number of elements of one message (``HORO_LITE_CHUNK_ELEMENTS``).
        cuda_aware: the library takes device pointers (``cuda.is_aware``); else device tensors are staged.
    """

    def __init__(self, comm: Any, chunk_elements: int, cuda_aware: bool = False) -> None:
        self._mpi = sys.modules["mpi4py.MPI"]
        self._comm = comm
        self._chunk_elements = chunk_elements
        self._cuda_aware = cuda_aware
        self._staged: StagedTransport | None = None
        self._mailboxes: list[PersistentMailbox] = []
        self._abandoned: list[Token] = []  # receives
        self._kept: list[Token] = []  # holds memory that MPI may still read from
        self._whole_bytes = min(_LARGEST_MESSAGE_BYTES, chunk_elements)  # no element is under a byte
        self._byte = self._mpi.BYTE
        self._status = self._mpi.Status()
        self._any_source, self._any_tag = self._mpi.ANY_SOURCE, self._mpi.ANY_TAG
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        # The standard gives COMM_WORLD this attribute and no other: Open MPI's split communicators lack it.
        self.max_tag: int = min(self._mpi.COMM_WORLD.Get_attr(self._mpi.TAG_UB), 1 << 30)
        self.sent_bytes = 0

    def send(self, buffer: Array, peer: int, tag: int, whole: bool = False) -> Token:
        if type(buffer) is not np.ndarray or self._staged is not None:
            if not self._cuda_aware:
                self.sent_bytes += buffer.nbytes
                return self._staging().send(buffer, peer, tag, whole)
            buffer = cuda.for_mpi(buffer)
        try:
            if whole or buffer.nbytes <= self._whole_bytes:
                self.sent_bytes += buffer.nbytes
                return self._comm.Isend([buffer, self._byte], peer, tag)
            pieces = self._pieces(buffer)
            self.sent_bytes += buffer.nbytes
            return _Chunks([self._comm.Isend([p, self._byte], peer, tag) for p in pieces])
        except self._mpi.Exception as error:
            raise self.lost(error, peer) from error
        except _NO_BUFFER:
            return self.send(as_bytes(buffer), peer, tag, whole)

    def recv(self, buffer: Array, peer: int, tag: int, whole: bool = False) -> Token:
        if type(buffer) is not np.ndarray:
            if not self._cuda_aware:
                return self._staging().recv(buffer, peer, tag, whole)
            buffer = cuda.for_mpi(buffer)
        try:
            if whole or buffer.nbytes <= self._whole_bytes:
                return self._comm.Irecv([buffer, self._byte], peer, tag)
            return _Chunks([self._comm.Irecv([p, self._byte], peer, tag) for p in self._pieces(buffer)])
        except self._mpi.Exception as error:
            raise self.lost(error, peer) from error
        except _NO_BUFFER:
            return self.recv(as_bytes(buffer), peer, tag, whole)

    def done(self, tokens: Sequence[Token]) -> bool:
        try:
            if self._staged is not None:
                self._staged.advance()
            for token in tokens:
                if not token.Test():
                    return False
        except self._mpi.Exception as error:
            raise self.lost(error) from error
        return True

    def probe(self, tag: int | None = None) -> Message | None:
        status = self._status
        wanted = self._any_tag if tag is None else tag
        try:
            if not self._comm.Iprobe(self._any_source, wanted, status):
                return None
        except self._mpi.Exception as error:
            raise self.lost(error) from error
        return Message(status.Get_source(), status.Get_tag(), status.Get_count(self._byte))

    def abandon(self, receives: Sequence[Token], others: Sequence[Token]) -> None:
        self._abandoned += receives
        self._kept += others

    def mailbox(self, tag: int, capacity: int) -> Mailbox:
        mailbox = PersistentMailbox(self, self._mpi, self._comm, tag, capacity)
        self._mailboxes.append(mailbox)
        return mailbox

    def native(self, instruction: Native, tag: int) -> Token:
        operation, buffer, reduction, root = instruction
        if type(buffer) is not np.ndarray:
            if not self._cuda_aware:
                return self._staging().native(instruction, tag)
            cuda.for_mpi(buffer)
        if operation == "allreduce":
            operations = {
                Reduction.SUM: self._mpi.SUM, Reduction.MIN: self._mpi.MIN,
                Reduction.MAX: self._mpi.MAX, Reduction.PRODUCT: self._mpi.PROD,
            }
            return self._comm.Iallreduce(self._mpi.IN_PLACE, buffer, operations[reduction])
        if operation == "broadcast":
            return self._comm.Ibcast([as_bytes(buffer), self._byte], root)
        raise ArgumentError(f"MPI is not asked to do {operation!r}; expected allreduce or broadcast")

    def subgroup(self, ranks: Sequence[int]) -> MPITransport | None:
        member = self.rank in ranks
        key = list(ranks).index(self.rank) if member else 0
        comm = self._comm.Split(0 if member else self._mpi.UNDEFINED, key)
        return MPITransport(comm, self._chunk_elements, self._cuda_aware) if member else None

    def close(self) -> None:
        if not self._mpi.Is_finalized():
            for mailbox in self._mailboxes:
                mailbox.close()
            self._drain()
            for receive in self._abandoned:  # after the last message of this space, before the first of another
                if not isinstance(receive, Staged):
                    _end(receive)
            self._comm.Free()

    def _drain(self) -> None:
        """Collective: receive what nobody has asked for, such as the messages of an operation that failed.

        MPI gives a freed communicator's number to the next one, which would take them for its own. Messages of one
        rank are found in the order in which they were sent, so nothing of it is left once its last one is there.
        """
        last = self.max_tag
        nothing = np.empty(0, np.uint8)
        others = set(range(self.size)) - {self.rank}
        leaving = [self._comm.Isend([nothing, self._byte], peer, last) for peer in sorted(others)]
        backoff = Backoff()
        while others or not self.done(leaving):
            message = self.probe()
            if message is None:
                backoff.pause()
                continue
            buffer = np.empty(message.size_bytes, np.uint8)
            self._comm.Recv([buffer, self._byte], message.peer, message.tag)
            if message.tag == last:
                others.discard(message.peer)

    def _staging(self) -> StagedTransport:
        """The way for device tensors, made for the first one. From then on everything is sent through it, so that
        messages stay in order.
        """
        if self._staged is None:
            self._staged = StagedTransport(MPITransport(self._comm, self._chunk_elements))
        return self._staged

    def _pieces(self, buffer: Array) -> list[Array]:
        step = max(1, min(self._chunk_elements, _LARGEST_MESSAGE_BYTES // buffer.itemsize))
        return [as_bytes(buffer[start : start + step]) for start in range(0, len(buffer), step)]

    def lost(self, error: Exception, peer: int | None = None) -> PeerLostError:
        """An error of the MPI library as what callers know."""
        whom = "" if peer is None else f" to or from rank {peer}"
        return PeerLostError(f"rank {self.rank}: a message{whom} failed in the MPI library: {error}")
