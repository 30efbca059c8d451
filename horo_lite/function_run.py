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
    num_proc: int = 1,
    *,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    executable: str | None = None,
    timeout_s: float | None = None,
    verbose: bool | int | None = None,
    options: Sequence[str] = (),
    **flags: Any,
) -> list[Any]:
    """Call a function on several ranks, each a new process, and return what each rank returned.

    Args:
        func: calls ``init()`` itself; it, its arguments and its results are pickled by cloudpickle.
        num_proc: the number of ranks.
        np: the same.
        hosts: ``"host:slots,..."``; this machine when neither this nor ``hostfile`` is given.
        executable: the Python that runs the function; by default this one.
        timeout_s: the job is ended after so long.
        options: more words for ``horo-lite run``.
        **flags: Horovod's other keywords, of which each stands for a flag of ``horo-lite run``: ``ssh_port``,
            ``mpi_args``, ``network_interface``, ``output_filename`` and so on.

    Raises:
        TypeError: a keyword is none of these.
        HorovodInternalError: the job ended with an error; its output says why.
    """
    ranks = num_proc if np is None else np
    words = ["-np", str(ranks), *(["--verbose"] if verbose else [])]
    given = {"hosts": hosts, "hostfile": hostfile, "timeout": timeout_s, **flags}
    words += [word for name, value in given.items() for word in _words(name, value)]
    python = executable or sys.executable
    with tempfile.TemporaryDirectory(prefix="horo-lite-") as folder:  # mode 0700, as mkdtemp makes it
        call = Path(folder, CALL)
        call.touch(mode=0o600)
        call.write_bytes(cloudpickle.dumps((func, tuple(args), dict(kwargs or {}))))
        command = [sys.executable, "-m", "horo_lite.cli", "run", *words, *options]
        command += [python, "-m", "horo_lite.cli.function_rank", folder]
        status = subprocess.run(command, check=False, preexec_fn=end_with_parent).returncode
        if status != 0:
            raise HorovodInternalError(
                f"run({func!r}, np={ranks}): the job ended with status {status}; why, its ranks have printed above"
            )
        results: list[Any] = cloudpickle.loads(Path(folder, RESULTS).read_bytes())
        return results


_SWITCHES = {"use_gloo": "gloo", "use_mpi": "mpi", "disable_cache": "disable_cache"}
_VALUES = {"slots": "slots_per_host", "cooldown_range": "blacklist_cooldown_range"} | {name: name for name in (
    "hosts", "hostfile", "timeout", "min_num_proc", "max_num_proc", "min_np", "max_np", "reset_limit",
    "host_discovery_script", "start_timeout", "ssh_port", "ssh_identity_file", "output_filename", "mpi_args",
    "network_interface", "network_interfaces",
)}  # fmt: skip


def _words(keyword: str, value: Any) -> list[str]:
    if keyword not in _SWITCHES and keyword not in _VALUES:
        raise TypeError(f"run() got an unexpected keyword argument {keyword!r}")
    if value is None or value is False:
        return []
    if keyword in _SWITCHES:
        return [_flag(_SWITCHES[keyword])]
    values = value if isinstance(value, (list, tuple)) else [value]
    if keyword == "network_interfaces":
        values = [",".join(values)]
    return [_flag(_VALUES[keyword]), *map(str, values)]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
