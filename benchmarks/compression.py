"""What compression costs and what it saves.

    python benchmarks/compression.py speed        one core: encoding and decoding of each method
    python benchmarks/compression.py step         one exchange on this job's ranks and network, against none
    python benchmarks/compression.py network      step on four hosts, made of network namespaces (needs root)
    python benchmarks/compression.py break-even   table and plot of what several runs of step wrote

``step --link 100`` names its table after the link, in Mbit/s, on which it is run. Rates are of the dense gradient.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support.launch import on_ranks
from support.netns import Cluster, find_hydra, why_unavailable
from support.report import RESULTS, Report
from support.timing import in_turn, medians, ratio

from horo_lite.compression import Compression as C
from horo_lite.compression import as_compressor, payload_bytes
from horo_lite.interfaces import GatherRequest, Group, Parameter, SumRequest

HOSTS = 4
POWERSGD_SIDE = 4096  # the matrix that its target is for
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
    "randomk 1 %": C.with_feedback(C.randomk(0.01)),
    "threshold": C.threshold(3.0),
    "dgc 0.1 %": C.dgc,
    "powersgd rank 4": C.powersgd(4),
}
ENCODE_TARGETS_MB_S = {"bf16": 2000, "sign": 500, "int8": 500, "qsgd 8 bits": 500, "qsgd 4 bits": 500, "topk 1 %": 200}


def answer(request: Any) -> Any:
    """The reply in a world of one."""
    if isinstance(request, SumRequest):
        return request.array
    return [request.payload] if isinstance(request, GatherRequest) else list(request.payloads)


def timed_exchange(compressor: Any, gradient: Any, state: dict[str, Any]) -> tuple[float, float, int]:
    """Processor seconds until the first request is made, and from then on; payload bytes."""
    start = time.thread_time()  # not the wall's: others may be using the machine
    work = compressor.reduce([gradient], [state], Group.whole(0, 1))
    request, total = next(work), 0
    encoded = time.thread_time()
    try:
        while True:
            total += payload_bytes(request)
            request = work.send(answer(request))
    except StopIteration:
        return encoded - start, time.thread_time() - encoded, total


def make_gradient(side: int, options: argparse.Namespace, seed: int = 0) -> Any:
    gradient = np.random.default_rng(seed).standard_normal(side * side).astype(np.float32)
    if options.device == "numpy":
        return gradient
    import torch

    torch.set_num_threads(1)
    return torch.from_numpy(gradient).to(options.device)


def speed(options: argparse.Namespace) -> int:
    """Encoding and decoding on one core, methods in turn so that a busy machine hits all alike."""
    report = Report("compression-speed", options.output)
    gradient = make_gradient(options.side, options)
    parameters = [Parameter("weight", (options.side, options.side))]
    methods = {name: method for name, method in METHODS.items() if name in (options.methods or METHODS)}
    chosen = {name: as_compressor(method).bind(parameters) for name, method in methods.items()}
    states: dict[str, dict[str, Any]] = {name: {} for name in chosen}
    times: dict[str, list[tuple[float, float, int]]] = {name: [] for name in chosen}
    for _ in range(options.rounds + 1):
        for name, compressor in chosen.items():
            times[name].append(timed_exchange(compressor, gradient, states[name]))
    records = []
    for name, measured in times.items():
        encode_s, decode_s, payload = (statistics.median(column) for column in zip(*measured[1:], strict=True))
        records.append(
            {
                "method": name,
                "dense bytes over payload bytes": gradient.nbytes / payload,
                "encode MB/s": gradient.nbytes / encode_s / 1e6,
                "decode and feedback MB/s": gradient.nbytes / decode_s / 1e6,
                "both ms": (encode_s + decode_s) * 1e3,
            }
        )
    report.table(
        f"{gradient.nbytes / 1e6:.0f} MB of float32, {options.device}, one core, processor time",
        list(records[0]),
        [[r["method"], *(f"{value:,.4g}" for value in list(r.values())[1:])] for r in records],
    )
    report.csv(records)
    rates = ("encode MB/s", "decode and feedback MB/s")
    bars = {r["method"].replace(" ", "\n"): {key: r[key] for key in rates} for r in records if r["method"] != "none"}
    report.bars("One core", "MB/s", bars)
    by_name = {record["method"]: record for record in records}
    for name, target in ENCODE_TARGETS_MB_S.items():
        rate = by_name[name]["encode MB/s"] if name in by_name else None
        report.target(f"{name}, encoding", rate, at_least=target, unit="MB/s")
    whole_ms = by_name.get("powersgd rank 4", {}).get("both ms") if options.side == POWERSGD_SIDE else None
    report.target(f"powersgd rank 4, {POWERSGD_SIDE} x {POWERSGD_SIDE}", whole_ms, at_most=60, unit="ms")
    return report.finish()


def step(options: argparse.Namespace) -> int:
    """Seconds per exchange of one gradient on all ranks, methods in turn."""
    on_ranks(options.ranks)
    import horo_lite as hvd

    hvd.init()
    from mpi4py import MPI

    report = Report(f"compression-step-{options.link:g}", options.output, writes=hvd.rank() == 0)
    gradient = make_gradient(options.side, options, hvd.rank()).reshape(options.side, options.side)

    def call(name: str, method: Any) -> Any:
        return lambda: hvd.allreduce(gradient, name=name, compression=method)

    chosen = {name: method for name, method in METHODS.items() if name in (options.methods or METHODS)}
    chosen = {"none": C.none, **chosen}
    calls = {name: call(name, method) for name, method in chosen.items()}
    times = in_turn(calls, MPI.COMM_WORLD, options.rounds)
    records = [
        {"link": options.link, "ranks": hvd.size(), "method": name, "ms": seconds * 1e3,
         "times faster than none": ratio(times, "none", name)}
        for name, seconds in medians(times).items()
    ]  # fmt: skip
    report.table(
        f"{gradient.nbytes / 1e6:.1f} MB on {hvd.size()} ranks, links of {options.link:g} Mbit/s",
        ["method", "ms", "times faster than none"],
        [[r["method"], f"{r['ms']:.1f}", f"{r['times faster than none']:.2f}"] for r in records],
    )
    report.csv(records)
    hvd.shutdown()
    return report.finish()


def network(options: argparse.Namespace) -> int:
    """``step`` on hosts with links of several speeds, one rank each."""
    reason = why_unavailable() or ("" if find_hydra() else "mpiexec.hydra not found: pip install mpich")
    if reason:
        print(f"skipped: {reason}")
        return 0
    with Cluster(HOSTS, f"{options.links[0]:g}mbit") as cluster:
        for link in options.links:
            cluster.shape(f"{link:g}mbit")
            command = [
                sys.executable, __file__, "step", "--link", str(link), "--side", str(options.side),
                "--rounds", str(options.rounds), "--output", str(options.output),
                *(["--methods", *options.methods] if options.methods else []),
            ]  # fmt: skip
            done = cluster.run(command, HOSTS, per_host=1, limit_s=1800, mpirun=str(find_hydra()))
            print(done.stdout, flush=True)
            if done.returncode != 0:
                return done.returncode
    return break_even(options)


def break_even(options: argparse.Namespace) -> int:
    """One line per method over the link's speed; where it crosses 1, no compression becomes the better choice."""
    report = Report("compression-break-even", options.output)
    lines: dict[str, list[tuple[float, float]]] = {}
    for path in sorted(options.output.glob("compression-step-*.csv")):
        with path.open() as file:
            for row in csv.DictReader(file):
                point = float(row["link"]), float(row["times faster than none"])
                lines.setdefault(row["method"], []).append(point)
    for points in lines.values():
        points.sort()
    links = [link for link, _ in lines["none"]]
    report.table(
        "Times faster than no compression",
        ["method", *(f"{link:g} Mbit/s" for link in links), "pays below, Mbit/s"],
        [
            [name, *(f"{gain:.2f}" for _, gain in points), crossing(points)]
            for name, points in lines.items() if name != "none"
        ],
    )  # fmt: skip
    report.plot("What each method gains", "link, Mbit/s", "times faster than none", lines)
    return report.finish()


def crossing(points: Sequence[tuple[float, float]]) -> str:
    """The link's speed at which a method gains nothing any more, on a straight line between logarithms."""
    for (slow, more), (fast, less) in itertools.pairwise(points):
        if more > 1 >= less:
            share = math.log(more) / math.log(more / less)
            return f"{slow * (fast / slow) ** share:,.0f}"
    return f"more than {points[-1][0]:,g}" if points[-1][1] > 1 else f"less than {points[0][0]:,g}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "step", "network", "break-even"])
    parser.add_argument("--side", type=int, default=2048, help="rows and columns of the gradient")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="numpy", help="numpy, or torch's name of a device (cpu, cuda)")
    parser.add_argument("--ranks", type=int, default=4, help="step: ranks, where no launcher has started this")
    parser.add_argument("--link", type=float, default=1000.0, help="step: the links' Mbit/s, for table and plot")
    parser.add_argument("--links", nargs="*", type=float, default=[10.0, 100.0, 1000.0], help="network: in Mbit/s")
    parser.add_argument("--methods", nargs="*", help="some methods only")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    return {"speed": speed, "step": step, "network": network, "break-even": break_even}[options.what](options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
