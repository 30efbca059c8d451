"""``horo-lite simulate``: how each all-reduce passes its messages, and what it costs on a network that need not exist.

The schedules are those of a real job, and so are the sums; only the time is virtual (``transport/simulator.py``).
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from horo_lite.arrays import kernel
from horo_lite.collectives import algorithms
from horo_lite.collectives.registry import Algorithm
from horo_lite.interfaces import Group, Reduction
from horo_lite.transport.network_model import NetworkModel
from horo_lite.transport.simulator import Message, Outcome, Simulator

_STAGING_ELEMENTS = 3 << 18
_MOST_ROWS = 100


class Example(NamedTuple):
    """An all-reduce of float32: rank r has r + 1 in its first element, r + 2 in the next, and so on from 8 on again."""

    ranks: int
    elements: int
    network: NetworkModel

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node."""
        node = self.network.node_of(self.ranks)
        return tuple(tuple(rank for rank in range(self.ranks) if node[rank] == i) for i in range(max(node) + 1))

    def buffer(self, rank: int) -> Any:
        """A rank's own values. (elements,)"""
        return (np.arange(self.elements) % 8 + rank + 1).astype(np.float32)

    @property
    def total(self) -> Any:
        """What every rank must have in the end: whole numbers, so that the order of additions shows in no bit."""
        return (np.arange(self.elements) % 8) * self.ranks + self.ranks * (self.ranks + 1) / 2


class Played(NamedTuple):
    """What an algorithm did."""

    outcome: Outcome
    messages: list[Message]
    exact: bool


def playable(example: Example) -> dict[str, Algorithm]:
    """The all-reduces that can run here: the MPI library's own cannot, and some need all ranks on one node."""
    one_node = len(example.nodes) == 1
    return {
        name: entry
        for name, entry in algorithms("allreduce").items()
        if name != "native" and (one_node or not entry.one_node)
    }


def play(entry: Algorithm, example: Example) -> Played:
    """Run it on all ranks."""
    messages: list[Message] = []
    simulator = Simulator(example.ranks, example.network, messages.append)
    arithmetic = simulator.timed(kernel("float32", Reduction.SUM, example.ranks))
    buffers = [example.buffer(rank) for rank in range(example.ranks)]
    context = {
        "nodes": example.nodes,
        "staging": [np.zeros(_STAGING_ELEMENTS, np.float32) for _ in range(example.ranks)],
    }
    group = functools.partial(Group.whole, size=example.ranks)
    outcome = simulator.run(lambda rank: entry(group(rank), buffers[rank], arithmetic, **context))
    exact = all((buffer == example.total).all() for buffer in buffers)
    return Played(outcome, sorted(messages, key=lambda message: (message.start_s, message.source)), exact)


def _compare(played: dict[str, Played], console: Console) -> None:
    table = Table(title="All-reduce in virtual time", title_justify="left")
    table.add_column("algorithm", no_wrap=True)
    for heading in ("time", "messages of a rank", "bytes sent by a rank", "bytes leaving a node"):
        table.add_column(heading, justify="right")
    for name, (outcome, _, _) in sorted(played.items(), key=lambda item: item[1].outcome.elapsed_s):
        table.add_row(
            name, f"{outcome.elapsed_s * 1e6:,.1f} us", f"{max(outcome.messages):,}", f"{max(outcome.sent_bytes):,}",
            f"{max(outcome.crossing_bytes):,}",
        )
    console.print(table)
    wrong = [name for name, one in played.items() if not one.exact]
    console.print(f"Wrong sums: {', '.join(wrong)}" if wrong else "The sums are exact on all ranks.")


def explained(entry: Algorithm) -> str:
    """What its docstring says: steps, cost, when it wins; the source is often the whole module's."""
    text = inspect.getdoc(entry.schedule) or ""
    paragraphs = [paragraph for paragraph in text.split("\n\n") if not paragraph.startswith("Args:")]
    if "Source:" not in text:
        whole = inspect.getdoc(inspect.getmodule(entry.schedule)) or ""
        paragraphs += [paragraph for paragraph in whole.split("\n\n") if paragraph.startswith("Source:")]
    if "log2 P" in text:
        paragraphs.append("P is the largest power of two up to N.")
    return click.wrap_text("\n\n".join(paragraphs), 78, preserve_paragraphs=True)


def _steps(entry: Algorithm, played: Played, example: Example, console: Console) -> None:
    console.print(f"{entry.name}, with N = {example.ranks} ranks and n = {example.elements:,} elements on each")
    console.print(explained(entry) + "\n", markup=False, highlight=False)
    table = Table(title=f"{entry.name}, message by message", title_justify="left")
    for heading in ("leaves at", "arrives at", "from", "to", "bytes"):
        table.add_column(heading, justify="right")
    for message in played.messages[:_MOST_ROWS]:
        table.add_row(
            f"{message.start_s * 1e6:,.1f} us", f"{message.arrival_s * 1e6:,.1f} us", f"rank {message.source}",
            f"rank {message.target}", f"{message.size_bytes:,}",
        )
    console.print(table)
    if len(played.messages) > _MOST_ROWS:
        console.print(f"... and {len(played.messages) - _MOST_ROWS} more")


def _draw(played: dict[str, Played], example: Example, path: Path) -> None:
    """A picture of all messages: a row for each rank, time to the right, an arrow for each message."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise click.ClickException("a plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(11, len(played) * (1.2 + 0.3 * example.ranks)), layout="constrained")
    axes = figure.subplots(len(played), squeeze=False, sharex=True)[:, 0]
    for axis, (name, (outcome, messages, _)) in zip(axes, played.items(), strict=True):
        for message in messages:
            axis.annotate(
                "", (message.arrival_s * 1e6, message.target), (message.start_s * 1e6, message.source),
                arrowprops={"arrowstyle": "->", "color": f"C{message.source % 10}", "alpha": 0.8,
                            "shrinkA": 0, "shrinkB": 0},
            )  # fmt: skip
        for rank, end_s in enumerate(outcome.finish_s):
            axis.plot([0, end_s * 1e6], [rank, rank], color=f"C{rank % 10}", linewidth=1)
        axis.set(title=f"{name}: {outcome.elapsed_s * 1e6:,.0f} us", ylabel="rank", yticks=range(example.ranks))
        axis.set_ylim(example.ranks - 0.5, -0.5)
    axes[-1].set_xlabel("us")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{path} cannot be written: {error}") from None


@click.command()
@click.option("-np", "--ranks", type=click.IntRange(1, 1024), default=4, show_default=True, help="How many ranks.")
@click.option("--ranks-per-node", type=click.IntRange(min=1), default=1, show_default=True,
              help="How many of them share a node and its port to the network.")
@click.option("--elements", type=click.IntRange(0, 1 << 26), default=1 << 18, show_default=True,
              help="float32 numbers that each rank has.")
@click.option("--latency-us", type=click.FloatRange(min=0), default=30.0, show_default=True,
              help="Microseconds from one node to another.")
@click.option("--gbit", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True,
              help="Gbit/s of a node's port, each way.")
@click.option("--algorithm", "names", multiple=True, metavar="NAME",
              help="Only this one, explained and message by message; may be given several times.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Draw the messages (.png, .svg or .pdf).")
def simulate(
    ranks: int, ranks_per_node: int, elements: int, latency_us: float, gbit: float, names: tuple[str, ...],
    plot: Path | None,
) -> None:
    """Show how all-reduce works, and what each algorithm costs on a network of your choice.

    Nothing is sent: all ranks live in this process, with the schedules and sums of a real job and virtual time.
    """
    network = NetworkModel(latency_s=latency_us * 1e-6, bandwidth=gbit * 1e9 / 8, ranks_per_node=ranks_per_node)
    example = Example(ranks, elements, network)
    entries = playable(example)
    for name in names:
        if name not in entries:
            other = algorithms("allreduce").get(name)
            why = (
                f"there is no all-reduce {name!r}" if other is None
                else f"{name!r} needs all ranks on one node: --ranks-per-node {ranks}" if other.one_node
                else f"{name!r} is the MPI library's own all-reduce, which is not known step by step"
            )  # fmt: skip
            raise click.UsageError(f"{why}; there are here: {', '.join(entries)}")
    console = Console()
    played = {name: play(entries[name], example) for name in names or entries}
    for name in dict.fromkeys(names):
        _steps(entries[name], played[name], example, console)
    _compare(played, console)
    console.print(
        f"Assumed besides: a message costs each side {network.overhead_s * 1e6:g} us; within a node it takes "
        f"{network.local_latency_s * 1e6:g} us and {network.local_bandwidth * 8e-9:g} Gbit/s; a rank adds up "
        f"{network.reduce_rate * 1e-9:g} GB and copies {network.copy_rate * 1e-9:g} GB a second.",
        highlight=False,
    )
    if plot is not None:
        _draw(played, example, plot)
        console.print(f"Drawn in {plot}.")
