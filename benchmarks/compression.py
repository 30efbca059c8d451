"""What compression costs and what it saves.

    python benchmarks/compression.py speed              one core: encoding and decoding of each method
    mpirun -np 4 python benchmarks/compression.py step  time of one exchange of each method, on the network it runs on
    python benchmarks/compression.py plot RESULTS.csv   break-even plot of several ``step`` runs

Each prints a table; with ``--csv`` and ``--png`` it writes the same as files. Rates are of the dense gradient.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from horo_lite.compression import Compression as C
from horo_lite.compression import as_compressor, payload_bytes
from horo_lite.interfaces import GatherRequest, Group, Parameter, SumRequest

METHODS: dict[str, Any] = {
    "none": C.none,
    "fp16": C.fp16,
    "bf16": C.bf16,
    "fp8": C.fp8,
    "int8": C.int8,
    "qsgd 8 bits": C.qsgd,
    "qsgd 4 bits": C.qsgd(bits=4),
    "qsgd 2 bits": C.qsgd(bits=2),
    "terngrad": C.terngrad,
    "natural": C.natural,
    "sign": C.sign,
    "signum": C.signum,
    "onebit": C.onebit,
    "topk 1 %": C.topk(0.01),
    "topk 0.1 %": C.topk(0.001),
    "randomk 1 %": C.randomk(0.01),
    "threshold": C.threshold(3.0),
    "dgc 0.1 %": C.dgc,
    "powersgd rank 4": C.powersgd(4),
}


def answer(request: Any) -> Any:
    """The reply in a world of one."""
    if isinstance(request, SumRequest):
        return request.array
    return [request.payload] if isinstance(request, GatherRequest) else list(request.payloads)


def timed_exchange(
    compressor: Any, gradients: Sequence[Any], states: Sequence[Any]
) -> tuple[float, float, int]:
    """Processor seconds until the first request is made, and from then on; payload bytes."""
    start = time.thread_time()  # not the wall's: others may be using the machine
    work = compressor.reduce(gradients, states, Group.whole(0, 1))
    request, total = next(work), 0
    encoded = time.thread_time()
    try:
        while True:
            total += payload_bytes(request)
            request = work.send(answer(request))
    except StopIteration:
        pass
    return encoded - start, time.thread_time() - encoded, total


def speed(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Encoding and decoding on one core, methods in turn so that a busy machine hits all alike."""
    side = arguments.side
    gradient: Any = np.random.default_rng(0).standard_normal(side * side).astype(np.float32)
    if arguments.framework == "torch":
        import torch

        torch.set_num_threads(1)
        gradient = torch.from_numpy(gradient).to(arguments.device)
    parameters = [Parameter("weight", (side, side))]
    chosen = {name: as_compressor(method).bind(parameters) for name, method in METHODS.items()}
    states: dict[str, list[dict[str, Any]]] = {name: [{}] for name in chosen}
    times: dict[str, list[tuple[float, float, int]]] = {name: [] for name in chosen}
    for _ in range(arguments.repeats + 1):
        for name, compressor in chosen.items():
            times[name].append(timed_exchange(compressor, [gradient], states[name]))
    dense = gradient.nbytes
    rows = []
    for name, measured in times.items():
        encode_s = statistics.median(m[0] for m in measured[1:])
        decode_s = statistics.median(m[1] for m in measured[1:])
        rows.append(
            {
                "method": name,
                "ratio": dense / measured[-1][2],
                "encode MB/s": dense / encode_s / 1e6,
                "decode MB/s": dense / decode_s / 1e6,
                "both ms": (encode_s + decode_s) * 1e3,
                # Below this link speed the bytes saved are worth more than the time spent.
                "pays below Mbit/s": _break_even(dense, measured[-1][2], encode_s + decode_s),
            }
        )
    return rows


def _break_even(dense: int, payload: int, spent_s: float) -> float:
    return max(0, dense - payload) * 8 / spent_s / 1e6


def step(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds per exchange of one gradient on all ranks, methods in turn."""
    import horo_lite as hvd

    hvd.init()
    elements = int(arguments.mbytes * 1e6 / 4)
    side = int(elements**0.5)
    gradient = np.random.default_rng(hvd.rank()).standard_normal((side, side)).astype(np.float32)
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    for repeat in range(arguments.repeats + 1):
        for name, method in METHODS.items():
            hvd.barrier()
            start = time.perf_counter()
            hvd.allreduce(gradient, name=name, compression=method)
            hvd.barrier()
            if repeat:
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(measured) for name, measured in times.items()}
    if hvd.rank() != 0:
        return []
    return [
        {
            "link": arguments.link,
            "ranks": hvd.size(),
            "method": name,
            "ms": seconds * 1e3,
            "times faster than none": medians["none"] / seconds,
        }
        for name, seconds in medians.items()
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as text in columns."""
    cells = [list(rows[0]), *([_text(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )


def _text(value: Any) -> str:
    return (
        f"{value:,.3g}"
        if isinstance(value, float) and value < 100
        else (f"{value:,.0f}" if isinstance(value, float) else str(value))
    )


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append to a table, with a heading where the file is new."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def draw_speed(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Encoding and decoding rates as bars."""
    axes, figure = _axes("MB/s of float32 on one core")
    positions = np.arange(len(rows))
    axes.barh(positions - 0.2, [row["encode MB/s"] for row in rows], 0.4, label="encode")
    axes.barh(positions + 0.2, [row["decode MB/s"] for row in rows], 0.4, label="decode")
    axes.set_yticks(positions, [row["method"] for row in rows])
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def draw_steps(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """How many times faster than no compression, over the link's speed, one line per method."""
    axes, figure = _axes("link, Mbit/s")
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        point = float(row["link"]), float(row["times faster than none"])
        lines.setdefault(row["method"], []).append(point)
    for index, (name, points) in enumerate(lines.items()):
        axes.plot(
            *zip(*sorted(points), strict=True),
            "-o" if index < 10 else "--s",
            label=name,
            markersize=3,
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylabel("times faster than none")
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _axes(label: str) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 6))
    axes.set_xlabel(label)
    return axes, figure


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["speed", "step", "plot"])
    parser.add_argument(
        "results", nargs="?", type=Path, help="for plot: the table that step runs wrote"
    )
    parser.add_argument(
        "--side", type=int, default=2048, help="speed: rows and columns of the gradient"
    )
    parser.add_argument("--mbytes", type=float, default=4.0, help="step: size of the gradient")
    parser.add_argument("--link", default="1000", help="step: Mbit/s, for the table")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--framework", choices=["numpy", "torch"], default="numpy")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.what == "plot":
        with arguments.results.open() as file:
            draw_steps(arguments.png or arguments.results.with_suffix(".png"), csv.DictReader(file))
        return
    run: Callable[[argparse.Namespace], list[dict[str, Any]]] = {"speed": speed, "step": step}[
        arguments.what
    ]
    rows = run(arguments)
    if not rows:
        return
    print(table(rows))
    if arguments.csv:
        write_csv(arguments.csv, rows)
    if arguments.png and arguments.what == "speed":
        draw_speed(arguments.png, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
