"""``horo_lite.run``: a function on several ranks, from a notebook or a script.

The function travels through a file of mode 0600 in a folder of mode 0700, both made here, and over the job's own MPI:
nothing else is ever unpickled.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from horo_lite.engine.faults.parent import end_with_parent
from horo_lite.errors import HorovodInternalError

CALL, RESULTS = "call.pkl", "results.pkl"


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    hosts: str | None = None,
    hostfile: str | None = None,
    *,
    num_proc: int | None = None,
    timeout_s: float | None = None,
    verbose: bool = False,
    options: Sequence[str] = (),
) -> list[Any]:
    """Call a function on ``np`` ranks, each a new process, and return what each rank returned.

    Args:
        func: calls ``init()`` itself; it, its arguments and its results are pickled by cloudpickle.
        hosts: ``"host:slots,..."``; this machine when neither this nor ``hostfile`` is given.
        num_proc: Horovod's other name of ``np``.
        timeout_s: the job is ended after so long.
        options: more words for ``horo-lite run``.

    Raises:
        HorovodInternalError: the job ended with an error; its output says why.
    """
    np = np if num_proc is None else num_proc
    words = ["-np", str(np), *(["--verbose"] if verbose else [])]
    given = {"--hosts": hosts, "--hostfile": hostfile, "--timeout": timeout_s}
    words += [word for option, value in given.items() if value is not None for word in (option, str(value))]
    with tempfile.TemporaryDirectory(prefix="horo-lite-") as folder:  # mode 0700, as mkdtemp makes it
        call = Path(folder, CALL)
        call.touch(mode=0o600)
        call.write_bytes(cloudpickle.dumps((func, tuple(args), dict(kwargs or {}))))
        command = [sys.executable, "-m", "horo_lite.cli", "run", *words, *options]
        command += [sys.executable, "-m", "horo_lite.cli.function_rank", folder]
        status = subprocess.run(command, check=False, preexec_fn=end_with_parent).returncode
        if status != 0:
            raise HorovodInternalError(
                f"run({func!r}, np={np}): the job ended with status {status}; why, its ranks have printed above"
            )
        results: list[Any] = cloudpickle.loads(Path(folder, RESULTS).read_bytes())
        return results
