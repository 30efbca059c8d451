"""The command ``horo-lite`` and its sub-commands."""

from __future__ import annotations

import click

from horo_lite.cli.doctor import doctor
from horo_lite.cli.run import run
from horo_lite.cli.simulate import simulate
from horo_lite.version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="horo-lite")
def main() -> None:
    """Data-parallel training on MPI: start a job, find out why one does not start, see how its messages go."""


main.add_command(run)
main.add_command(doctor)
main.add_command(simulate)
