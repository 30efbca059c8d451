"""Which launcher belongs to the MPI library that mpi4py loads.

A child process tells of the library, so that this one never starts MPI; the launcher is the one beside that library,
checked by what it says of itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from horo_lite.cli.launchers import LAUNCHERS, Launcher, Slurm
from horo_lite.errors import LaunchError, MPIMissingError
from horo_lite.transport.mpi import how_to_have_one

_ROOT = str(Path(__file__).parents[2])
_ASK_S = 60.0
"""How long a child may take to answer; a cold import from a network file system takes its time."""


@dataclasses.dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py loads in this environment."""

    version: str
    """Its whole version text, several lines for some libraries."""
    paths: tuple[str, ...]
    """The files it was loaded from; empty where the system cannot tell."""
    mpi4py: str

    @property
    def summary(self) -> str:
        """Name and version in one line."""
        first = self.version.split("\n")[0]
        return " ".join(first.split(",")[0].split())


def ask_mpi(function: str, python: str = sys.executable) -> list[str]:
    """The command of a child that calls a function of ``transport.mpi`` and prints its answer as JSON."""
    found = f"import json, sys; sys.path.append({_ROOT!r}); from horo_lite.transport import mpi; "
    return [python, "-c", f"{found}json.dump(mpi.{function}(), sys.stdout)"]


def find_library(python: str = sys.executable) -> Library:
    """Ask a child process which MPI library mpi4py loads.

    Raises:
        MPIMissingError: none could be loaded; carries the loader's own words and what to install.
    """
    try:
        answer = subprocess.run(
            ask_mpi("describe_library", python), capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise MPIMissingError(
            f"{python} did not load the MPI library within {_ASK_S:.0f} s (a slow file system?). Try again, or see "
            "what it says by itself: python -c 'from mpi4py import MPI'"
        ) from None
    if answer.returncode != 0:
        cause = answer.stderr.strip().splitlines()[-1:] or [f"exit status {answer.returncode}"]
        raise MPIMissingError(f"no MPI library could be loaded ({cause[0]}). {how_to_have_one()}")
    fields = json.loads(answer.stdout.splitlines()[-1])  # a communication library may have printed lines before
    return Library(fields["version"], tuple(fields["paths"]), fields["mpi4py"])


def find_launcher(library: Library | None = None, name: str | None = None) -> Launcher:
    """The launcher that belongs to the installed MPI, or the one called ``name``.

    Raises:
        LaunchError: none was found, or the ones found belong to another MPI; lists where was looked.
        MPIMissingError: no MPI library could be loaded.
    """
    library = library or find_library()
    if name == Slurm.name:
        path = _first_program([Slurm], _search_path(()), "srun").path
        return Slurm(path, _slurm_plugin(path, library))
    kinds = [kind for kind in LAUNCHERS if library.version.startswith(kind.library) and kind.library]
    if name is not None:
        kinds = [kind for kind in kinds if kind.name == name]
    if not kinds:
        known = ", ".join(sorted({kind.name for kind in LAUNCHERS}))
        wanted = f"launcher {name!r} was asked for" if name else "no launcher is known for it"
        raise LaunchError(f"the MPI library is {library.summary}; {wanted}. Known launchers: {known}")
    return _first_program(kinds, _search_path(library.paths), library.summary)


def _search_path(library_files: Sequence[str]) -> list[str]:
    """Folders in which to look: beside this Python, beside the MPI library, then PATH."""
    folders = [os.path.dirname(sys.executable), os.path.join(sys.prefix, "bin")]
    for file in library_files:
        # A wheel for Debian's layout has lib/x86_64-linux-gnu/libmpi.so with the programs in bin.
        folders += [str(parent / "bin") for parent in list(Path(file).parents)[1:4]]
    folders += os.environ.get("PATH", os.defpath).split(os.pathsep)
    return list(dict.fromkeys(folders))


def _first_program(kinds: Sequence[type[Launcher]], folders: Sequence[str], what: str) -> Launcher:
    others = []
    for folder in folders:
        for kind in kinds:
            for program in kind.program:
                path = shutil.which(program, path=folder)
                if path is None:
                    continue
                banner = _output(path, "--version")
                if kind.banner.lower() in banner.lower():
                    return kind(path)
                others.append(f"{path} ({banner.splitlines()[0] if banner else 'says nothing'})")
    names = " or ".join(dict.fromkeys(program for kind in kinds for program in kind.program))
    found = f" Found, but of another MPI: {'; '.join(dict.fromkeys(others))}." if others else ""
    raise LaunchError(f"no {names} that belongs to {what} was found.{found} Looked in: {', '.join(folders)}")


def _slurm_plugin(srun: str, library: Library) -> str | None:
    """SLURM's plug-in for this library, where the site has it and no default of its own."""
    settings = _output(os.path.join(os.path.dirname(srun), "scontrol"), "show", "config")
    default = re.search(r"^MpiDefault\s*=\s*(\S+)", settings, re.MULTILINE)
    if default is not None and default[1] != "none":
        return None
    plugin = "pmix" if library.version.startswith("Open MPI") else "pmi2"
    return plugin if plugin in _output(srun, "--mpi=list").split() else None


def _output(*command: str) -> str:
    """What a program says; nothing where it can't be run or does not end."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (answer.stdout + answer.stderr).strip()
