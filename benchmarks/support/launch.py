"""A benchmark is started as an ordinary script; this turns it into a job of several ranks.

``python benchmarks/collectives.py`` and ``mpirun -np 2 python benchmarks/collectives.py`` do the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NoReturn

from horo_lite.config import Launch


def on_ranks(ranks: int) -> None:
    """Go on where a launcher has started this process; elsewhere start the script on ``ranks`` ranks and exit with
    the job's status.
    """
    if Launch.from_environment().variable:
        return
    command = [
        sys.executable, "-m", "horo_lite.cli", "run", "-np", str(ranks), "--no-tag", sys.argv[0],
        *sys.argv[1:],
    ]
    sys.exit(subprocess.run(command, check=False).returncode)


def leave(status: int) -> NoReturn:
    """End a rank after ``hvd.shutdown()``. A missed target is no failure that the other ranks must hear of, which
    ``sys.exit`` with a status would be.
    """
    from mpi4py import MPI

    MPI.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
