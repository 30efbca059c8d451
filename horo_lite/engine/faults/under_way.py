"""A file for each rank that is under way, by which ``horo-lite run`` tells an orderly end from ``exit()`` in C code.

Such an end shows nowhere else: the process leaves with status 0, no Python of it runs any more, and MPICH's launcher
then kills the other ranks and calls the job a success.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

_NOTE = re.compile(r"(\d+)\.\d+")


def enter(folder: str, rank: int) -> Callable[[], None]:
    """Leave a note in a folder that the launching process has made; returns what takes it away again.

    Args:
        folder: "" for none. Where it can't be written, as on another host, nothing is noted.
    """
    if not folder:
        return _nothing
    note = Path(folder) / f"{rank}.{os.getpid()}"  # a subprocess may be a rank 0 of its own
    try:
        note.touch(mode=0o600, exist_ok=True)
    except OSError:
        return _nothing

    def leave() -> None:
        with contextlib.suppress(OSError):  # its folder may be gone already
            note.unlink()

    return leave


def still_in(folder: str) -> list[int]:
    """The ranks whose note is still there; none where the folder is gone."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted({int(found.group(1)) for name in names if (found := _NOTE.fullmatch(name))})


def _nothing() -> None:
    pass
