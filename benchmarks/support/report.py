"""What a benchmark leaves behind: tables on the terminal, a CSV file, a plot, and a verdict on its targets.

::

    report = Report("collectives", folder, writes=hvd.rank() == 0)
    report.table("Latency", ["size", "ours", "Gloo"], rows)
    report.csv(records)
    report.plot("All-reduce", "bytes", "GB/s", {"ours": points})
    report.target("64 MiB against Gloo", measured, at_least=2.5, unit="x")
    leave(report.finish())
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parents[1] / "results"


@dataclasses.dataclass(frozen=True)
class Target:
    """A promise and what was measured.

    Attributes:
        measured: None where the run did not get to it, which is said but is no failure.
        bound: what it has to reach, or must not exceed.
        at_least: whether ``bound`` is a lower one.
    """

    what: str
    measured: float | None
    bound: float
    at_least: bool
    unit: str = ""

    @property
    def met(self) -> bool:
        if self.measured is None:
            return True
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    @property
    def verdict(self) -> str:
        """One word for the table."""
        if self.measured is None:
            return "[yellow]not measured[/]"
        return "[green]met[/]" if self.met else "[red]MISSED[/]"


class Report:
    """The output of one benchmark.

    Args:
        name: of the CSV file and the plots.
        folder: where they go.
        writes: False on the ranks that stay silent.
    """

    def __init__(self, name: str, folder: Path = RESULTS, writes: bool = True) -> None:
        self._name = name
        self._folder = folder
        self._writes = writes
        # Launchers give a rank no terminal, or one of 80 columns that nobody sees.
        self._console = Console(width=max(Console().width, 150), quiet=not writes)
        self._targets: list[Target] = []

    def note(self, text: str) -> None:
        """A line of plain text."""
        self._console.print(text, highlight=False)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """A table: first column to the left, numbers to the right, None as a dash."""
        table = Table(title=title, title_justify="left")
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=True)
        for row in rows:
            table.add_row(*["-" if cell is None else str(cell) for cell in row])
        self._console.print(table)

    def csv(self, records: Sequence[Mapping[str, Any]], suffix: str = "") -> None:
        """Write ``name[-suffix].csv``; all records have the keys of the first."""
        if self._writes and records:
            with self._path(suffix, "csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, list(records[0]))
                writer.writeheader()
                writer.writerows(records)

    def plot(
        self,
        title: str,
        x_label: str,
        y_label: str,
        series: Mapping[str, Sequence[tuple[float, float]]],
        suffix: str = "",
        log_y: bool = True,
    ) -> None:
        """Write ``name[-suffix].png``: one line per competitor over a logarithmic x axis."""
        axes = self._axes(title)
        if axes is None:
            return
        for index, (label, points) in enumerate(series.items()):
            style = ("-", "--", ":")[index // 10 % 3]  # there are ten colours
            axes.plot([x for x, _ in points], [y for _, y in points], style, marker="o", markersize=3, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log" if log_y else "linear")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        beside = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if len(series) > 8 else {}
        axes.legend(fontsize="small", **beside)
        self._save(axes, suffix)

    def bars(
        self, title: str, y_label: str, groups: Mapping[str, Mapping[str, float]], suffix: str = ""
    ) -> None:
        """Write ``name[-suffix].png``: one group of bars per key, one bar in it per competitor."""
        axes = self._axes(title)
        if axes is None:
            return
        competitors = list(dict.fromkeys(name for group in groups.values() for name in group))
        width = 0.8 / max(1, len(competitors))
        for index, name in enumerate(competitors):
            places = [place + index * width for place, group in enumerate(groups.values()) if name in group]
            axes.bar(places, [group[name] for group in groups.values() if name in group], width, label=name)
        middle = 0.4 - width / 2
        axes.set_xticks([place + middle for place in range(len(groups))], list(groups))
        axes.set_ylabel(y_label)
        axes.legend(fontsize="small")
        self._save(axes, suffix)

    def target(
        self,
        what: str,
        measured: float | None,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        unit: str = "",
    ) -> None:
        """Judge a measurement by one bound, ``at_least`` or ``at_most``; None is a measurement that was left out."""
        if (at_least is None) == (at_most is None):
            raise ValueError(f"{what}: give either at_least or at_most")
        bound = at_least if at_least is not None else at_most
        self._targets.append(Target(what, measured, bound, at_least is not None, unit))  # type: ignore[arg-type]

    def finish(self) -> int:
        """Print the targets. Returns the exit status: 1 when one was missed."""
        if self._targets:
            self.table(
                "Targets", ["target", "wanted", "measured", ""],
                [
                    (
                        target.what,
                        f"{'at least' if target.at_least else 'at most'} {target.bound:g} {target.unit}".rstrip(),
                        None if target.measured is None else f"{target.measured:.3g} {target.unit}".rstrip(),
                        target.verdict,
                    )
                    for target in self._targets
                ],
            )
        return int(not all(target.met for target in self._targets))

    def _path(self, suffix: str, kind: str) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{self._name}{f'-{suffix}' if suffix else ''}.{kind}"

    def _axes(self, title: str) -> Any:
        """Axes to draw on; None where nothing is to be drawn."""
        if not self._writes:
            return None
        try:
            import matplotlib
        except ImportError:
            self.note("no plot: matplotlib is not installed (pip install matplotlib)")
            return None
        matplotlib.use("Agg")
        from matplotlib import pyplot

        _, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        axes.set_title(title)
        axes.grid(visible=True, alpha=0.3)
        return axes

    def _save(self, axes: Any, suffix: str) -> None:
        from matplotlib import pyplot

        path = self._path(suffix, "png")
        axes.figure.savefig(path, dpi=120)
        pyplot.close(axes.figure)
        self.note(f"plot: {path}")


def bytes_text(count: float) -> str:
    """1024 as "1 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:g} {unit}" if count == int(count) else f"{count:.1f} {unit}"


def seconds_text(seconds: float) -> str:
    """0.0012 as "1.20 ms"."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"
