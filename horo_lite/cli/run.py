"""``horo-lite run``: from a script and a number of ranks to the launcher's command line and environment."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from horo_lite.cli import launchers, machine
from horo_lite.cli.supervise import TIMED_OUT, supervise
from horo_lite.errors import HoroLiteError

_ALIAS = Path(__file__).parent / "alias"
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
@click.option("-np", "--num-proc", "ranks", type=click.IntRange(min=1), required=True, metavar="N",
              help="Ranks to start.")
@click.option("--launcher", "name", metavar="NAME",
              help="mpich, intelmpi, openmpi or slurm; by default the one that belongs to the installed MPI library.")
@click.option("--bind/--no-bind", default=False, help="Pin each rank to its share of the cores (default: no binding).")
@click.option("--tag/--no-tag", default=True, help="Begin each line of output with its rank (default: yes).")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
              help=f"End the job after so long, with exit status {TIMED_OUT}.")
@click.option("--horovod", is_flag=True, help="Let `import horovod` in the script find horo_lite.")
@click.option("--launcher-args", default="", metavar="TEXT", help="Options handed to the launcher as they are.")
@click.option("--dry-run", is_flag=True, help="Print the command and start nothing.")
@click.option("-v", "--verbose", is_flag=True, help="Print the command, then run it.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def run(
    ranks: int, name: str | None, bind: bool, tag: bool, timeout_s: float | None, horovod: bool, launcher_args: str,
    dry_run: bool, verbose: bool, command: tuple[str, ...],
) -> None:
    """Run SCRIPT on N ranks: `horo-lite run -np 4 train.py --epochs 3`.

    Any command may stand in place of the script. The exit status is the job's.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        launcher = launchers.find_launcher(name=name)
    except HoroLiteError as error:
        raise click.ClickException(str(error)) from None
    job = launchers.Job(
        python_command(command), ranks, machine.usable_cores(), bind, tag, tuple(shlex.split(launcher_args))
    )
    words = launcher.command(job)
    environment = child_environment(launcher, job, horovod)
    if dry_run or verbose:
        added = {key: value for key, value in environment.items() if os.environ.get(key) != value}
        line = shlex.join(["env", *(f"{key}={value}" for key, value in sorted(added.items())), *words])
        click.echo(line, err=not dry_run)
    if dry_run:
        return
    if job.oversubscribed:
        console.print(
            f"horo-lite: {ranks} ranks share {job.cores} core{'s' if job.cores > 1 else ''}; they take turns, so "
            "expect no speed-up beyond the cores",
            style="yellow",
        )
    status = supervise(words, environment, timeout_s)
    if status == TIMED_OUT and timeout_s is not None:
        console.print(f"horo-lite: the job was ended after {timeout_s:g} s (--timeout)", style="red")
    sys.exit(status)
