"""A rank does not outlive the launcher that started it.

A killed ``mpirun`` leaves ranks running that are not inside MPI at that moment (measured with Open MPI). Linux kills
the child of a process that dies if asked; everywhere, the service thread looks whether the parent is still the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBRARY = ctypes.CDLL(None) if sys.platform.startswith("linux") else None  # loaded before any fork
_LAUNCHERS = {
    "hydra_pmi_proxy", "mpiexec", "mpiexec.hydra", "mpirun", "orted", "orterun", "prted", "prterun", "slurmstepd",
}


def die_with_launcher() -> None:
    """Ask Linux to kill this process when its launcher dies, even while no Python code can run in it.

    Linux means the parent's *thread* that started us: only of launchers is it known that this one lives as long as
    they do. A wrapper script between launcher and rank is left to ``Parent``.
    """
    with contextlib.suppress(OSError):
        if _LIBRARY is not None and Path(f"/proc/{os.getppid()}/comm").read_text().strip() in _LAUNCHERS:
            _LIBRARY.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_parent() -> None:
    """For a launcher between fork and exec: where its parent is killed, Linux asks it to end, and it cleans up."""
    if _LIBRARY is not None:
        _LIBRARY.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Parent:
    """Whose child this process was when it was asked first."""

    def __init__(self) -> None:
        self._pid = os.getppid()

    @property
    def gone(self) -> bool:
        """The parent has ended, so that another process has adopted this one."""
        return os.getppid() != self._pid
