"""``horo-lite doctor``: one page to read or to paste into a report."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from horo_lite.cli import run
from horo_lite.cli.examination import HostOptions, Report, examine
from horo_lite.errors import ArgumentError, HoroLiteError


def _show(report: Report, console: Console) -> None:
    for title, rows in report.sections.items():
        console.print(title, style="bold")
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(no_wrap=True, min_width=18)
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(name, value)
        console.print(table)
        console.print()
    for line in report.advice:
        console.print(f"- {line}")
    if not report.advice:
        console.print("Nothing to advise.")


@click.command()
@click.option("-H", "--hosts", metavar="LIST", help="Also test each pair of these: host,host,...")
@click.option("--hostfile", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="The same, one host a line.")
@click.option("--network-interface", "interface", metavar="NAME", help="The network interface between hosts.")
@click.option("--launcher-args", default="", metavar="TEXT", help="Options handed to the launcher as they are.")
@click.option("--pair-timeout", "limit_s", type=click.FloatRange(min=0, min_open=True), default=HostOptions.limit_s,
              metavar="SECONDS", help="How long a pair of hosts may take (default: 30).")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(
    hosts: str | None, hostfile: Path | None, interface: str | None, launcher_args: str, limit_s: float, as_json: bool
) -> None:
    """Tell what is installed and whether two ranks, and every two of the hosts given, can talk.

    Exit status 0 means that they can.
    """
    try:
        report = examine(
            HostOptions(run.places_of(hosts, hostfile), interface, tuple(shlex.split(launcher_args)), limit_s)
        )
    except ArgumentError as error:
        raise click.UsageError(str(error)) from None
    except HoroLiteError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        _show(report, Console(highlight=False, markup=False))
    sys.exit(0 if report.works else 1)
