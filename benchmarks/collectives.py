"""All-reduce on one node: this package, the MPI library's own and Gloo, in turn within one run.

    python benchmarks/collectives.py                       # 2 ranks, 256 B to 256 MiB, three types
    python benchmarks/collectives.py --quick               # a minute: float32 at four sizes
    mpirun -np 4 python benchmarks/collectives.py --sizes 1MiB,64MiB --types float16

Competitors reduce in place (Sum), and each one's result is checked before it is timed. Bus bandwidth is the NCCL
tests' (2 (N - 1) / N bytes per byte reduced). The bound is what the bytes cost that any all-reduce through shared
memory must move, at the rate at which all ranks together add or copy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.competitors import (
    GLOO,
    ITEM_BYTES,
    LIBRARY,
    OURS,
    RESIDENT,
    Call,
    Competitors,
    Schedules,
)
from support.launch import leave, on_ranks
from support.options import sizes
from support.report import RESULTS, Report, bytes_text, seconds_text
from support.timing import Times, calls_for, in_turn, medians, ratio

SIZES = tuple(256 * 4**power for power in range(11))
QUICK_SIZES = (1 << 10, 64 << 10, 1 << 20, 64 << 20)
TARGET_BYTES = 64 << 20
FREE_S = 40e-6
"""What agreement and Python may cost a small message over the MPI library's own call."""


def measure(calls: Mapping[str, Call], comm: Any, rounds: int) -> Times:
    """Time them in turn, small messages many times per measurement."""
    first = {}
    for name, call in calls.items():
        comm.Barrier()
        start = time.perf_counter()
        call()
        first[name] = time.perf_counter() - start
    seconds = [second for rank in comm.allgather(first) for second in rank.values()]
    return in_turn(calls, comm, rounds, calls_for(min(seconds), max(seconds)))


def memory_rate(comm: Any) -> float:
    """Bytes read and written per second by each rank while all do: the better of a copy and an addition in place."""
    import numpy as np

    elements = 16 << 20
    source, target = np.full(elements, 1, np.float32), np.full(elements, 1, np.float32)
    times = medians(
        in_turn(
            {
                "copy": lambda: np.copyto(target, source),
                "add": lambda: np.add(target, source, out=target),
            },
            comm, rounds=5,
        )
    )
    return max(2 * source.nbytes / times["copy"], 3 * source.nbytes / times["add"])


def bound_bytes(size_bytes: int, ranks: int) -> float:
    """What one rank reads and writes at least: its slice of N buckets, reduced into one; then the other slices."""
    return size_bytes * (1 + 1 / ranks + 2 * (ranks - 1) / ranks)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="when started without mpirun (default: 2)")
    parser.add_argument("--sizes", type=sizes, help="for example 1KiB,64MiB")
    parser.add_argument("--types", type=lambda text: text.split(","), help="float32,float16,bfloat16")
    parser.add_argument("--rounds", type=int, help="measurements of each competitor")
    parser.add_argument("--quick", action="store_true", help="float32 at four sizes, no single algorithms")
    parser.add_argument("--no-algorithms", action="store_true", help="leave the single algorithms out")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the CSV and PNG files")
    options = parser.parse_args(arguments)
    options.sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    options.types = options.types or (["float32"] if options.quick else list(ITEM_BYTES))
    options.rounds = options.rounds or (7 if options.quick else 11)
    options.no_algorithms |= options.quick
    return options


class Comparison:
    """All competitors at all sizes of one type, with what is judged.

    Args:
        rate: bytes per second of memory traffic, for the bound.
    """

    def __init__(self, kind: str, ranks: int, rate: float) -> None:
        self.kind = kind
        self._ranks = ranks
        self._rate = rate
        self._times: dict[int, Times] = {}
        self._medians: dict[int, dict[str, float]] = {}

    def add(self, size_bytes: int, times: Times) -> None:
        """What was measured at one size."""
        self._times[size_bytes] = times
        self._medians[size_bytes] = medians(times)

    def show(self, report: Report) -> None:
        """The tables of times and bandwidths."""
        names = list(dict.fromkeys(name for of in self._medians.values() for name in of))
        against = [
            (slow, fast) for slow in (LIBRARY, GLOO) for fast in (OURS, RESIDENT) if {slow, fast} <= set(names)
        ]
        report.table(
            f"All-reduce, {self.kind}, {self._ranks} ranks: time of one call",
            ["size", *names, *[f"{slow} / {fast}" for slow, fast in against]],
            [
                [
                    bytes_text(size),
                    *[seconds_text(of[name]) if name in of else None for name in names],
                    *[self._times_faster(size, slow, fast) for slow, fast in against],
                ]
                for size, of in self._medians.items()
            ],
        )
        report.table(
            f"All-reduce, {self.kind}, {self._ranks} ranks: bus bandwidth in GB/s, and share of the memory's bound",
            ["size", *names, *[f"{name}, of bound" for name in (OURS, RESIDENT) if name in names]],
            [
                [
                    bytes_text(size),
                    *[f"{self._bus(size, of[name]) / 1e9:.3g}" if name in of else None for name in names],
                    *[self._share(size, name) for name in (OURS, RESIDENT) if name in names],
                ]
                for size, of in self._medians.items()
            ],
        )

    def records(self) -> list[dict[str, Any]]:
        """One per size and competitor, for the CSV file."""
        return [
            {
                "type": self.kind, "ranks": self._ranks, "bytes": size, "competitor": name, "seconds": seconds,
                "algorithm_bandwidth": size / seconds, "bus_bandwidth": self._bus(size, seconds),
                "share_of_bound": bound_bytes(size, self._ranks) / self._rate / seconds,
            }
            for size, of in self._medians.items()
            for name, seconds in of.items()
        ]

    def points(self) -> dict[str, list[tuple[float, float]]]:
        """Bus bandwidth over size, by competitor."""
        series: dict[str, list[tuple[float, float]]] = {}
        for size, of in self._medians.items():
            for name, seconds in of.items():
                series.setdefault(name, []).append((size, self._bus(size, seconds) / 1e9))
        return series

    def judge(self, report: Report) -> None:
        """The targets that this type has."""
        if self.kind == "float32" and self._ranks == 2:
            for fast, slow, bound in (
                (OURS, LIBRARY, 1.7), (OURS, GLOO, 2.5), (RESIDENT, LIBRARY, 3.0), (RESIDENT, GLOO, 5.0),
            ):
                times = self._times.get(TARGET_BYTES, {})
                measured = ratio(times, slow, fast) if {slow, fast} <= times.keys() else None
                report.target(
                    f"64 MiB, {fast}: times as fast as {slow}", measured, at_least=bound, unit="x"
                )
        worst = max(
            (((of[OURS] - FREE_S) / of[LIBRARY], size) for size, of in self._medians.items() if LIBRARY in of),
            default=None,
        )
        if worst is not None:
            report.target(
                f"{self.kind}, any size: (time - 40 us) / MPI's (worst at {bytes_text(worst[1])})",
                max(worst[0], 0.0), at_most=1 / 0.9, unit="x",
            )

    def _times_faster(self, size: int, slow: str, fast: str) -> str | None:
        times = self._times[size]
        return f"{ratio(times, slow, fast):.2f}" if {slow, fast} <= times.keys() else None

    def _bus(self, size_bytes: int, seconds: float) -> float:
        return size_bytes * 2 * (self._ranks - 1) / self._ranks / seconds

    def _share(self, size_bytes: int, name: str) -> str | None:
        """Below some MiB everything is in caches, for which the bound says nothing."""
        seconds = self._medians[size_bytes].get(name)
        if seconds is None or size_bytes < 16 << 20:
            return None
        return f"{bound_bytes(size_bytes, self._ranks) / self._rate / seconds:.0%}"


def compare_algorithms(options: argparse.Namespace, comm: Any, report: Report) -> None:
    """Every algorithm by itself, float32."""
    schedules = Schedules(comm)
    rows, records = [], []
    for size_bytes in options.sizes:
        elements = size_bytes // ITEM_BYTES["float32"]
        times = medians(measure(schedules.calls(elements, "float32"), comm, max(3, options.rounds // 2)))
        rows.append([bytes_text(size_bytes), *[seconds_text(seconds) for seconds in times.values()]])
        records += [{"bytes": size_bytes, "algorithm": name, "seconds": s} for name, s in times.items()]
    report.table(
        f"All-reduce by algorithm, float32, {comm.Get_size()} ranks: time of its schedule alone",
        ["size", *times], rows,
    )
    report.csv(records, "algorithms")


def main() -> None:
    """Measure, show, judge; the exit status is 1 when a target is missed."""
    options = parse()
    on_ranks(options.ranks)
    import horo_lite.torch as hvd

    hvd.init()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    report = Report("collectives", options.output, writes=hvd.rank() == 0)
    rate = min(comm.allgather(memory_rate(comm)))
    report.note(
        f"{MPI.Get_library_version().splitlines()[0].strip()}; each rank moves {rate / 1e9:.1f} GB/s through memory"
    )
    competitors = Competitors(hvd, comm)
    records: list[dict[str, Any]] = []
    for kind in options.types:
        comparison = Comparison(kind, hvd.size(), rate)
        for size_bytes in options.sizes:
            calls = competitors.calls(size_bytes // ITEM_BYTES[kind], kind)
            comparison.add(size_bytes, measure(calls, comm, options.rounds))
            del calls
            competitors.close()
        comparison.show(report)
        comparison.judge(report)
        records += comparison.records()
        report.plot(
            f"All-reduce of {kind}, {hvd.size()} ranks of one node", "bytes", "bus bandwidth, GB/s",
            comparison.points(), "" if kind == "float32" else kind,
        )
    report.csv(records)
    if not options.no_algorithms:
        compare_algorithms(options, comm, report)
    competitors.finish()
    status = report.finish()
    hvd.shutdown()
    leave(status)


if __name__ == "__main__":
    main()
