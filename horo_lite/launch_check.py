"""What ``init()`` finds out about how the job was started, and says before it hangs or trains wrongly.

The usual faults: another MPI's ``mpirun``, so that every process is rank 0 of 1; ``init()`` in a worker of a
DataLoader; versions or settings that differ between hosts; more threads than cores.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from horo_lite.config import Config, Launch, forget_launcher, mark_rank
from horo_lite.errors import DisagreementError, LaunchError
from horo_lite.log import logger
from horo_lite.version import __version__

if TYPE_CHECKING:
    from horo_lite.transport.topology import Topology

_World = TypeVar("_World")
_TIMER = signal.ITIMER_REAL
_LEAST_INIT_S = 60.0  # ranks import frameworks at different speeds, however short the limit of operations
_MUST_AGREE = ("algorithm", "bucket_bytes", "chunk_elements", "segment_bytes", "shared_memory", "cuda_aware")
"""Settings from which each rank derives, by itself, what the others send."""


class Passport(NamedTuple):
    """What each rank tells the others once, at ``init()``."""

    version: str
    settings: tuple[Any, ...]
    cores: frozenset[int]
    threads_set: bool


# --- Before MPI is initialised -------------------------------------------------------------------------------------


def check_process(launch: Launch, mpi_is_running: bool) -> Launch:
    """Find out whether this process may be a rank.

    Returns:
        What the launcher has said to this process: nothing when it is a child of a rank, and so a world of one.

    Raises:
        LaunchError: it is a worker of ``multiprocessing``, which would be a second process of its parent's rank.
    """
    child = not mpi_is_running and _is_child_of_rank(launch)
    if (child or launch.announced > 1) and _is_worker():
        raise LaunchError(
            "init() was called in a child process of multiprocessing (a DataLoader worker?): only the processes that "
            'mpirun started are ranks. Put the script\'s body under if __name__ == "__main__":, so that workers '
            "started by spawn or forkserver import it without running it."
        )
    if not child:
        return launch
    forget_launcher()
    return Launch()


def _is_worker() -> bool:
    """A process of multiprocessing; one that is still importing the main script has no parent yet."""
    importing = getattr(multiprocessing.current_process(), "_inheriting", False)
    return importing or multiprocessing.parent_process() is not None


def _is_child_of_rank(launch: Launch) -> bool:
    if launch.pmi_fd is not None:
        return not _is_socket(launch.pmi_fd)
    return launch.is_child


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def init_waits_until_every_process_has_called_it(launch: Launch, config: Config, start: Callable[[], _World]) -> _World:
    """Start MPI. Its libraries wait for all processes and let no Python run meanwhile, so that where one of them never
    comes only timers in C can speak: they print the stack, in which the name of this function is the message. The
    second one ends the process, and with it the job.
    """
    if launch.announced == 1:
        return start()
    _, abort_s = config.first_stall_limits_s
    with _stack_after(config.stall_warn_s), _killed_after(abort_s and max(abort_s, _LEAST_INIT_S)):
        return start()


@contextlib.contextmanager
def _stack_after(seconds: float) -> Iterator[None]:
    if not seconds:
        yield
        return
    faulthandler.dump_traceback_later(seconds, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _killed_after(seconds: float) -> Iterator[None]:
    """By SIGALRM, whose default it is to end a process; a program that uses it for something else keeps it."""
    if not seconds or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL or any(signal.getitimer(_TIMER)):
        yield
        return
    faulthandler.register(signal.SIGALRM, file=2, chain=True)
    signal.setitimer(_TIMER, seconds)
    try:
        yield
    finally:
        signal.setitimer(_TIMER, 0)
        faulthandler.unregister(signal.SIGALRM)


# --- Once MPI has told the size of the world -----------------------------------------------------------------------


def check_world(launch: Launch, config: Config, size: int, library: str) -> None:
    """Compare the launcher's number of processes with MPI's; say how to start more when there is one.

    Raises:
        LaunchError: the launcher has started several processes, but each is alone in its MPI world.
    """
    if size > 1:
        return
    if launch.announced == 1:
        logger.info("one process; to train on 4: %s", _how_to_start_more())
        return
    variable, announced = launch.variable, launch.announced
    if config.allow_single:
        logger.info("%s=%d, but this process goes on alone (HORO_LITE_ALLOW_SINGLE)", variable, announced)
        return
    raise LaunchError(
        f"{variable}={announced} says that {_LAUNCHERS[variable]} started {announced} processes, but in the MPI "
        f"library ({library}) each is rank 0 of 1: they would train without one another. {_ADVICE[variable]} "
        "horo-lite run -np N python train.py picks the launcher that fits the library; horo-lite doctor shows both. "
        "To go on with one process: HORO_LITE_ALLOW_SINGLE=1."
    )


def _how_to_start_more() -> str:
    if "ipykernel" in sys.modules:
        return "horo_lite.run(function, np=4)"
    script = sys.argv[0] if sys.argv and sys.argv[0].endswith(".py") else "train.py"
    return f"horo-lite run -np 4 python {script}"


_LAUNCHERS = {
    "PMI_SIZE": "the mpirun of MPICH or Intel MPI (or a PMI of SLURM)",
    "OMPI_COMM_WORLD_SIZE": "the mpirun of Open MPI",
    "SLURM_STEP_NUM_TASKS": "srun",
}
_ADVICE = {
    "PMI_SIZE": "Use the mpirun that belongs to this library.",
    "OMPI_COMM_WORLD_SIZE": "Use the mpirun that belongs to this library.",
    "SLURM_STEP_NUM_TASKS": "Choose SLURM's plug-in for this library: srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH, "
    "Intel MPI; srun --mpi=list shows what there is), or use mpirun inside the allocation.",
}


def check_ranks(
    launch: Launch, config: Config, topology: Topology, allgather: Callable[[Passport], Sequence[Passport]]
) -> None:
    """Collective: compare what each rank knows of itself, then settle the threads of this one.

    Raises:
        DisagreementError: versions or settings differ; the same text on every rank.
    """
    settings = tuple(getattr(config, name) for name in _MUST_AGREE)
    passports = allgather(Passport(__version__, settings, _own_cores(), launch.threads_set))
    _agree("versions of horo_lite", [p.version for p in passports], "Install the same version on every host.")
    for index, name in enumerate(_MUST_AGREE):
        variable = Config.__dataclass_fields__[name].metadata["variable"]
        _agree(f"values of {variable}", [p.settings[index] for p in passports], "Set it the same for every rank.")
    if topology.size > 1:
        _settle_threads(passports, topology)
        mark_rank()


def _own_cores() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _agree(what: str, values: Sequence[Any], advice: str) -> None:
    by_value: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(rank)
    if len(by_value) > 1:
        shown = "; ".join(f"{value} on rank {', '.join(map(str, ranks[:8]))}" for value, ranks in by_value.items())
        raise DisagreementError(f"init(): ranks have different {what}: {shown}. {advice}")


def _settle_threads(passports: Sequence[Passport], topology: Topology) -> None:
    """Keep the ranks of a node from using more threads than it has cores, and say so in one line on rank 0.

    torch starts with one thread for every core; with several ranks that is slower than one thread each. Applied to
    torch if it is loaded; what reads ``OMP_NUM_THREADS`` at its start is only told about.
    """
    own, ranks = passports[topology.rank], topology.local_size
    cores = len(frozenset().union(*(passports[rank].cores for rank in topology.local_ranks)))
    bound = len(own.cores) < cores
    threads = len(own.cores) if bound else max(1, cores // ranks)
    torch = sys.modules.get("torch")
    if not own.threads_set and torch is not None and torch.get_num_threads() > threads:
        torch.set_num_threads(threads)
    if topology.rank != 0:
        return
    if ranks > cores:
        logger.warning("%d ranks share %d core%s of this node: expect no speed-up", ranks, cores, "s"[: cores != 1])
    elif bound and len(own.cores) == 1 and (os.cpu_count() or 1) >= 2 * ranks:
        logger.warning(
            "each rank is bound to one core of %d: mpirun --bind-to none, or horo-lite run, lets it use more",
            os.cpu_count(),
        )
    elif not own.threads_set and threads < cores:
        logger.info("%d ranks on %d cores: OMP_NUM_THREADS=%d suits each of them", ranks, cores, threads)
