"""All processes that MPI has started together: who they are, where they run, and how they come to transports."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from horo_lite.config import Config
from horo_lite.errors import ArgumentError
from horo_lite.interfaces import Transport
from horo_lite.transport import cuda
from horo_lite.transport.faulty import FaultyTransport
from horo_lite.transport.mpi import load_mpi, thread_level
from horo_lite.transport.mpi_transport import MPITransport
from horo_lite.transport.topology import Topology

_before_finalize: list[Callable[[], None]] = []  # at most one


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
