"""The initialised world of this process: what ``init()`` makes and ``shutdown()`` gives back.

Nothing happens at import. One ``Context`` lives between ``init()`` and ``shutdown()``; every public call asks
``current()`` for it and gets Horovod's error when there is none.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import threading
from collections.abc import Sequence
from typing import Any

from horo_lite import launch_check, log
from horo_lite.config import Config, Launch
from horo_lite.engine import Engine, Instruments, WireStats
from horo_lite.engine.faults import ending, under_way
from horo_lite.engine.faults.exits import ForkedChild
from horo_lite.engine.faults.watch import make_watch
from horo_lite.engine.timeline import Timeline
from horo_lite.errors import ArgumentError, DisagreementError, NotInitializedError
from horo_lite.process_set_table import ProcessSetTable
from horo_lite.process_sets import Member, ProcessSet
from horo_lite.transport.mpi import mpi_is_running
from horo_lite.transport.mpi_world import MPIWorld
from horo_lite.transport.topology import Topology
from horo_lite.transport.waiting import is_crowded


class Context:
    """Everything between ``init()`` and ``shutdown()``.

    Args:
        comm: as ``init`` takes it.
    """

    def __init__(self, config: Config, comm: Any = None) -> None:
        launch = launch_check.check_process(Launch.from_environment(), mpi_is_running())
        self.config = config
        self.world = launch_check.init_waits_until_every_process_has_called_it(
            launch, config, lambda: MPIWorld(config, comm)
        )
        self.topology: Topology = self.world.topology
        self.rank = self.world.rank
        self.size = self.world.size
        log.set_up(config.log_level, self.rank, self.size)
        launch_check.check_world(launch, config, self.world.started, self.world.library_version)
        job_end = ending.install(self.world, self.rank) if self.size > 1 else None
        launch_check.check_ranks(launch, config, self.topology, self.world.allgather)
        self.instruments = Instruments(library=self.world.library_version)
        self.pid = os.getpid()
        threaded = self.world.thread_level in ("serialized", "multiple")
        self.engine = Engine(0 if is_crowded(self.topology.local_size) else 100, threaded, self.instruments)
        self.process_sets = ProcessSetTable(self.world, self.engine, config, self.instruments)
        self.watch = None if job_end is None else make_watch(self.engine, self.world, job_end, config, self.topology)
        self._take_note_away = under_way.enter(config.under_way_folder if self.size > 1 else "", self.rank)

    @property
    def members(self) -> dict[int, Member]:
        """This rank's part of each process set, by its number."""
        return self.process_sets.members

    def close(self, ended: str) -> None:
        """Collective: give threads and communicators back; MPI stays initialised.

        Args:
            ended: how this rank has come here, for those that wait for it.
        """
        self.engine.close()
        if self.instruments.timeline is not None:
            self.instruments.timeline.close()
        if self.watch is not None:
            self.watch.farewell(ended)
        self.process_sets.close()
        self.world.close()
        self._take_note_away()


_context: Context | None = None
_watches_forks = False
_initializing = threading.Lock()


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Start: initialise MPI, find the other ranks, get ready. A second call does nothing.

    Args:
        comm: None for all processes of the job; a list of ranks; or an mpi4py communicator (it is duplicated).
        process_sets: process sets to register, the same on all ranks; or "dynamic" to allow ``add_process_set``.

    Raises:
        MPIMissingError: no MPI library is installed; says what to install.
        LaunchError: another MPI's launcher was used, so that every process would be rank 0 of 1.
        ValueError: two process sets have the same ranks.
    """
    with _initializing:
        if _context is None:
            _init(comm, process_sets)


def _init(comm: Any, process_sets: Sequence[ProcessSet] | str | None) -> None:
    global _context, _watches_forks
    if not _watches_forks and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forked)
        _watches_forks = True
    config = Config.from_environment()
    if isinstance(process_sets, str):
        if process_sets != "dynamic":
            raise ArgumentError(f'process_sets={process_sets!r}: expected a list of process sets, or "dynamic"')
        config, process_sets = dataclasses.replace(config, dynamic_process_sets=True), None
    context = Context(config, comm)
    _context = context
    atexit.register(_leave, "finished")
    context.world.before_finalize(lambda: _leave("finalized MPI"))
    if context.config.timeline.upper() not in ("", "DYNAMIC"):
        start_timeline(context.config.timeline, config.timeline_mark_cycles)
    try:
        for process_set in process_sets or ():
            context.process_sets.register(process_set)
    except (ValueError, DisagreementError):  # on every rank; after another error the rest may be waiting for this one
        shutdown()
        raise


def shutdown() -> None:
    """Stop: operations still under way fail, MPI stays initialised, ``init()`` may be called again."""
    _leave("called shutdown()")


def _leave(ended: str) -> None:
    global _context
    if _context is None or _context.pid != os.getpid():
        return
    context, _context = _context, None
    atexit.unregister(_leave)
    context.close(ended)


def _forked() -> None:
    """In a child such as a data loader's worker: it may ask for ranks and sizes, but not talk to the other ranks."""
    global _initializing
    _initializing = threading.Lock()  # another thread of the parent may hold that one
    ForkedChild().install()
    if _context is not None:
        _context.engine.forbid(
            f"process {os.getpid()} was forked from rank {_context.rank} and is no rank itself: only the process that "
            "called init() can take part in collectives. Hand over to it what the ranks are to exchange"
        )


def is_initialized() -> bool:
    """True between ``init()`` and ``shutdown()``."""
    return _context is not None


def current() -> Context:
    """The initialised world.

    Raises:
        NotInitializedError: ``init()`` has not been called.
    """
    if _context is None:
        raise NotInitializedError()
    return _context


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Collective over all ranks: register a process set after ``init()``.

    Raises:
        ValueError: not initialised with ``process_sets="dynamic"``, or these ranks are registered already.
    """
    context = current()
    if not context.config.dynamic_process_sets:
        raise ArgumentError(
            'add_process_set needs init(process_sets="dynamic") or HOROVOD_DYNAMIC_PROCESS_SETS=1'
        )
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    context.process_sets.register(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Collective over all ranks: forget a process set. False when it was not registered or is the global one."""
    context = current()
    if not context.config.dynamic_process_sets:
        raise ArgumentError(
            'remove_process_set needs init(process_sets="dynamic") or HOROVOD_DYNAMIC_PROCESS_SETS=1'
        )
    return context.process_sets.unregister(process_set)


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The global ranks of every registered process set, by its number."""
    return {number: list(member.ranks) for number, member in current().members.items()}


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record from now on what the engine does, as a Chrome trace, on rank 0.

    Args:
        file_path: the file; an existing one is replaced.
        mark_cycles: also mark each round of the engine (``CYCLE_START``).

    Raises:
        ValueError: neither ``HORO_LITE_TIMELINE`` nor ``HOROVOD_TIMELINE`` is set (``DYNAMIC``), or no such folder.
    """
    context = current()
    if not context.config.timeline:
        raise ArgumentError("start_timeline() needs HOROVOD_TIMELINE=DYNAMIC in the environment before init()")
    stop_timeline()
    if context.rank == 0:
        context.instruments.timeline = Timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the recording and finish its file."""
    instruments = current().instruments
    timeline, instruments.timeline = instruments.timeline, None
    if timeline is not None:
        timeline.close()


def wire_stats() -> WireStats:
    """What this rank has exchanged since ``init()``: a snapshot."""
    context = current()
    sent_bytes = sum(lane.transport.sent_bytes for lane in context.process_sets.lanes)
    return dataclasses.replace(context.instruments.stats, sent_bytes=sent_bytes)


def rank() -> int:
    """This process among all, from 0."""
    return current().rank


def size() -> int:
    """The number of all processes."""
    return current().size


def local_rank() -> int:
    """This process among those of its node."""
    return current().topology.local_rank


def local_size() -> int:
    """The number of processes on this node."""
    return current().topology.local_size


def cross_rank() -> int:
    """This process's node among those that have a process of its local rank."""
    return current().topology.cross_rank


def cross_size() -> int:
    """The number of nodes that have a process of this one's local rank."""
    return current().topology.cross_size


def is_homogeneous() -> bool:
    """True when every node has the same number of processes."""
    return current().topology.is_homogeneous


def mpi_threads_supported() -> bool:
    """True when several threads may call MPI (MPI_THREAD_MULTIPLE was granted)."""
    return current().world.threads_multiple
