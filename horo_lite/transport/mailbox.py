"""Short messages on a tag of their own, in memory that is used again and again (``interfaces.Mailbox``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from horo_lite.interfaces import Array, Token, Transport


class ProbedMailbox:
    """By what every transport has: a receive for each message that a probe has found.

    Args:
        transport: sends and receives; others may use it as well, on other tags.
    """

    def __init__(self, transport: Transport, tag: int, capacity: int) -> None:
        self.outgoing: Array = np.zeros(capacity, np.uint8)
        self.incoming: Array = np.zeros(capacity, np.uint8)
        self._transport = transport
        self._tag = tag
        self._leaving: list[Token] = []
        self._arriving: tuple[Token, int, int] | None = None

    def post(self, nbytes: int, peer: int) -> None:
        self._leaving.append(self._transport.send(self.outgoing[:nbytes], peer, self._tag, whole=True))

    @property
    def posting(self) -> bool:
        return bool(self._leaving)

    def flush(self) -> bool:
        before = len(self._leaving)
        while self._leaving and self._transport.done(self._leaving[:1]):
            self._leaving.pop(0)
        return len(self._leaving) < before

    def receive(self) -> tuple[int, int] | None:
        if self._arriving is None:
            message = self._transport.probe(self._tag)
            if message is None:
                return None
            buffer = self.incoming[: message.size_bytes]
            token = self._transport.recv(buffer, message.peer, self._tag, whole=True)
            self._arriving = token, message.peer, message.size_bytes
        token, peer, nbytes = self._arriving
        if not self._transport.done((token,)):
            return None
        self._arriving = None
        return peer, nbytes


class PersistentMailbox:
    """By persistent requests of MPI (MPI 3.1, section 3.9).

    There is one receive for all and a send for each peer and length. To start and test such a pair takes 1 us, to make
    one 3 us.

    Args:
        transport: counts what is sent, and says what an error of the library means.
        mpi: ``mpi4py.MPI``.
        comm: the transport's communicator.
    """

    _MOST_REQUESTS = 256  # beyond, lengths that come once are sent by requests of their own

    def __init__(self, transport: Any, mpi: Any, comm: Any, tag: int, capacity: int) -> None:
        self.outgoing: Array = np.zeros(capacity, np.uint8)
        self.incoming: Array = np.zeros(capacity, np.uint8)
        self._mpi = mpi
        self._byte = mpi.BYTE
        self._transport = transport
        self._comm = comm
        self._tag = tag
        self._status = mpi.Status()
        self._sends: dict[tuple[int, int], Any] = {}
        self._leaving: list[Any] = []
        self._receive = comm.Recv_init([self.incoming, self._byte], mpi.ANY_SOURCE, tag)
        self._receiving = False

    def post(self, nbytes: int, peer: int) -> None:
        self._transport.sent_bytes += nbytes
        try:
            request = self._sends.get((nbytes, peer))
            if request is None:
                request = self._request(nbytes, peer)
            else:
                request.Start()
            if not request.Test():
                self._leaving.append(request)
        except self._mpi.Exception as error:
            raise self._transport.lost(error, peer) from error

    def _request(self, nbytes: int, peer: int) -> Any:
        message = [self.outgoing[:nbytes], self._byte]
        if len(self._sends) >= self._MOST_REQUESTS:
            return self._comm.Isend(message, peer, self._tag)
        request = self._sends[nbytes, peer] = self._comm.Send_init(message, peer, self._tag)
        request.Start()
        return request

    @property
    def posting(self) -> bool:
        return bool(self._leaving)

    def flush(self) -> bool:
        before = len(self._leaving)
        if before:
            try:
                self._leaving = [request for request in self._leaving if not request.Test()]
            except self._mpi.Exception as error:
                raise self._transport.lost(error) from error
        return len(self._leaving) < before

    def receive(self) -> tuple[int, int] | None:
        try:
            if not self._receiving:
                self._receive.Start()
                self._receiving = True
            if not self._receive.Test(self._status):
                return None
        except self._mpi.Exception as error:
            raise self._transport.lost(error) from error
        self._receiving = False
        return self._status.Get_source(), self._status.Get_count(self._byte)

    def close(self) -> None:
        """Give the requests back; what arrives later is found by a probe."""
        if self._receiving:
            self._receive.Cancel()
            self._receive.Wait()
        for request in (self._receive, *self._sends.values()):
            request.Free()
        self._sends.clear()
        self._receiving = False
