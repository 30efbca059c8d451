"""``horo-lite run``: from a script and a number of ranks to the launcher's command line and environment."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from horo_lite.cli import finding, horovod_flags, launchers, machine
from horo_lite.cli.hosts import Host, parse_hosts, read_hostfile
from horo_lite.cli.supervise import TIMED_OUT, supervise
from horo_lite.engine.faults import under_way
from horo_lite.errors import ArgumentError, HoroLiteError

_ALIAS = Path(__file__).parent / "alias"
_LONGEST_PAUSE_S = 30.0
_ASKED_TO_END = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_HINTS: dict[int, str] = {
    signal.SIGKILL: "if a rank was killed (SIGKILL), it was often out of memory: see dmesg, or the limits of the "
    "container or batch job",
    signal.SIGBUS: "if it was a bus error, /dev/shm is often full: in a container, --shm-size=2g",
}
"""By the signal that ended a rank, which MPICH's launcher returns as it is and Open MPI's as a shell does."""
_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
"""What torch and numpy read, and what TensorFlow reads; without them each rank takes every core."""


def python_command(words: Sequence[str]) -> list[str]:
    """The command that a rank runs: a script gets this Python in front, anything else is taken as it is."""
    first = words[0]
    if first.endswith(".py") or first in {"-m", "-c"}:
        return [sys.executable, *words]
    if first in {"python", "python3"}:  # the environment's own, even where it is not active
        return [sys.executable, *words[1:]]
    return list(words)


def child_environment(launcher: launchers.Launcher, job: launchers.Job, horovod: bool) -> dict[str, str]:
    """The environment of the launcher and its ranks: whatever the user has set stays, PATH and PYTHONPATH grow."""
    environment = dict(os.environ)
    for name, value in launcher.environment(job).items():
        if name == "PATH":
            environment[name] = value
        else:
            environment.setdefault(name, value)
    for name in _THREADS:
        environment.setdefault(name, str(job.cores_per_rank))
    if horovod:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ALIAS), environment.get("PYTHONPATH")]))
    return environment


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-np", "-n", "--num-proc", "ranks", type=click.IntRange(min=1), metavar="N",
              help="Ranks to start; by default one in every slot of the hosts, or as many as SLURM has allocated.")
@click.option("-H", "--hosts", metavar="LIST", help="Where to start them: host:slots,host:slots,...")
@click.option("--hostfile", "-hostfile", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="The same, one host a line: `host slots=N` or `host:N`.")
@click.option("--network-interface", "--network-interfaces", "interface", metavar="NAME",
              help="The network interface between hosts.")
@click.option("-p", "--ssh-port", type=click.IntRange(1, 65535), metavar="PORT", help="Where ssh listens on the hosts.")
@click.option("-i", "--ssh-identity-file", metavar="FILE", help="The key for ssh.")
@click.option("--launcher", "name", metavar="NAME",
              help="mpich, intelmpi, openmpi or slurm; by default the one that belongs to the installed MPI library.")
@click.option("--bind/--no-bind", default=False, help="Pin each rank to its share of the cores (default: no binding).")
@click.option("--tag/--no-tag", default=True, help="Begin each line of output with its rank (default: yes).")
@click.option("--output-filename", "output_folder", type=click.Path(file_okay=False), metavar="FOLDER",
              help="Write each rank's output to files of its own there.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
              help=f"End the job after so long, with exit status {TIMED_OUT}.")
@click.option("--max-restarts", type=click.IntRange(min=0), default=0, metavar="N",
              help="Start a failed job again up to N times; the script resumes from its last checkpoint.")
@click.option("--horovod", is_flag=True, help="Let `import horovod` in the script find horo_lite.")
@click.option("--launcher-args", "--mpi-args", "launcher_args", default="", metavar="TEXT",
              help="Options handed to the launcher as they are.")
@click.option("--dry-run", is_flag=True, help="Print the command and start nothing.")
@click.option("-v", "--verbose", is_flag=True, help="Print the command, then run it.")
@horovod_flags.options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def run(
    ranks: int | None, hosts: str | None, hostfile: Path | None, interface: str | None, name: str | None, bind: bool,
    tag: bool, output_folder: str | None, timeout_s: float | None, max_restarts: int, horovod: bool,
    launcher_args: str, dry_run: bool, verbose: bool, command: tuple[str, ...], ssh_port: int | None,
    ssh_identity_file: str | None, **horovods: Any,
) -> None:
    """Run SCRIPT on N ranks: `horo-lite run -np 4 train.py --epochs 3`.

    Any command may stand in place of the script. The exit status is the job's. The flags of horovodrun are understood.
    """
    try:
        places = places_of(hosts, hostfile)
        launcher = finding.find_launcher(name=name)
        job = launchers.Job(
            python_command(command), _ranks(ranks, places), machine.usable_cores(), bind, tag,
            tuple(shlex.split(launcher_args)), places, interface=interface, output_folder=output_folder,
            allocated=_allocated("SLURM_JOB_NUM_NODES") or 1,
            ssh=[word for pair in (("-p", ssh_port), ("-i", ssh_identity_file)) if pair[1] for word in map(str, pair)],
        )
        environment = child_environment(launcher, job, horovod) | horovod_flags.variables(horovods)
        job = dataclasses.replace(job, forwarded=forwarded(environment))
        words = launcher.command(job)
    except ArgumentError as error:
        raise click.UsageError(str(error)) from None
    except HoroLiteError as error:
        raise click.ClickException(str(error)) from None
    if dry_run or verbose:
        added = {key: value for key, value in environment.items() if os.environ.get(key) != value}
        line = shlex.join(["env", *(f"{key}={value}" for key, value in sorted(added.items())), *words])
        click.echo(line, err=not dry_run)
    without_effect = horovod_flags.without_effect(horovods)
    if without_effect:
        _say(f"without effect here: {', '.join(without_effect)}")
    if dry_run:
        return
    if output_folder:
        Path(output_folder).mkdir(parents=True, exist_ok=True)
    if job.oversubscribed:
        _say(
            f"{job.ranks_per_host} ranks share {job.cores} core{'s' if job.cores > 1 else ''}; they take turns, so "
            "expect no speed-up beyond the cores",
        )
    here = not places and launcher.name != "slurm" and job.ranks > 1
    sys.exit(_supervise(words, environment, timeout_s, max_restarts, here))


def places_of(hosts: str | None, hostfile: Path | None) -> tuple[Host, ...]:
    """The hosts of ``--hosts`` or ``--hostfile``; none for this machine."""
    if hosts is not None and hostfile is not None:
        raise ArgumentError("give --hosts or --hostfile, not both")
    if hosts is not None:
        return parse_hosts(hosts)
    return () if hostfile is None else read_hostfile(hostfile)


def _ranks(asked: int | None, places: Sequence[Host]) -> int:
    slots = sum(host.slots for host in places)
    ranks = asked or slots or _allocated("SLURM_NTASKS")
    if not ranks:
        raise ArgumentError("say how many ranks to start: -np N")
    if slots and ranks > slots:
        raise ArgumentError(f"-np {ranks}, but the hosts have {slots} slots: {', '.join(map(str, places))}")
    return ranks


def _allocated(variable: str) -> int:
    """A number that SLURM has set in an allocation; 0 outside."""
    value = os.environ.get(variable, "") if "SLURM_JOB_ID" in os.environ else ""
    return int(value) if value.isdecimal() else 0


def forwarded(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that ranks on other hosts need."""
    names = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", *_THREADS)
    return tuple(sorted(key for key in environment if key in names or key.startswith(("HORO_LITE_", "HOROVOD_"))))


def _supervise(
    words: Sequence[str], environment: Mapping[str, str], timeout_s: float | None, max_restarts: int,
    notes: bool = False,
) -> int:
    """Run the job, and again while it fails and restarts are left; a time-out or a signal to us is no failure.

    Args:
        notes: all ranks are on this machine, so that their notes (``under_way``) can be looked at.
    """
    for restarts in range(max_restarts + 1):
        with _notes_folder() if notes else contextlib.nullcontext("") as folder:
            added = {"HORO_LITE_RESTARTS": str(restarts), "HORO_LITE_UNDER_WAY_FOLDER": folder}
            status = supervise(words, {**environment, **added}, timeout_s)
            left = under_way.still_in(folder) if folder and status == 0 else []
        if left:
            status = 1
            _say(
                f"rank{'s' if len(left) > 1 else ''} {', '.join(map(str, left))} ended in the middle, though the "
                "launcher reports success: most often code in C has called exit()"
            )
        if status == TIMED_OUT and timeout_s is not None:
            _say(f"the job was ended after {timeout_s:g} s (--timeout)")
        number = status - 128 if status > 128 else status
        if number in _HINTS:
            _say(f"status {status}: {_HINTS[number]}")
        if status in (0, TIMED_OUT, *_ASKED_TO_END) or restarts == max_restarts:
            break
        pause_s = min(2.0**restarts, _LONGEST_PAUSE_S)
        _say(f"the job ended with status {status}; start {restarts + 2} of {max_restarts + 1} in {pause_s:g} s")
        time.sleep(pause_s)
    return status


@contextlib.contextmanager
def _notes_folder() -> Iterator[str]:
    """A folder of a random name that is this user's alone; "" where none can be made."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="horo_lite-", ignore_cleanup_errors=True)
    except OSError:
        yield ""
        return
    with folder as path:
        yield path


def _say(text: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"horo-lite: {text}", style="yellow")
