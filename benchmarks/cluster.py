"""All-reduce and training steps over four hosts on a slow network, which network namespaces make on this machine.

    python benchmarks/cluster.py                     # 10 Mbit/s to 1 Gbit/s, one and two ranks a host; needs root
    python benchmarks/cluster.py --quick             # 100 Mbit/s, one size
    python benchmarks/cluster.py --rates 100mbit --sizes 1MiB,16MiB

The bound of a ring is 2 (H - 1) / H bytes over each of H hosts' links, at what TCP carries of the link's rate. Compute
in the overlap part sleeps, as a host does whose accelerator computes: here all hosts share this machine's cores, so
nothing else would be comparable. At 1 Gbit/s those cores are the limit and not the network.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support.competitors import LIBRARY, OURS, RESIDENT
from support.netns import TCP_SHARE, Cluster, ClusterError, find_hydra, why_unavailable
from support.options import sizes
from support.report import RESULTS, Report, bytes_text, seconds_text
from support.timing import in_turn, medians

HOSTS = 4
RATES = {"10mbit": 10e6, "100mbit": 100e6, "1gbit": 1e9}
SIZES = (64 << 10, 1 << 20, 4 << 20, 16 << 20)
LONGEST_CALL_S = 6.0  # larger messages are left out on slow links
JUDGED_RATE, JUDGED_BYTES = "100mbit", 1 << 20
LAYERS, LAYER_BYTES = 16, 512 << 10
SLOW = 50e6  # bits a second: below, messages take seconds and vary little, so layers are smaller and rounds fewer
SLOW_LAYER_BYTES, SLOW_ROUNDS = 64 << 10, 2


def bound_s(size_bytes: int, rate: str) -> float:
    """What a ring over the hosts takes when the links are never idle."""
    return 2 * (HOSTS - 1) / HOSTS * size_bytes * 8 / (RATES[rate] * TCP_SHARE)


def layer_bytes(rate: str) -> int:
    """The gradient of one layer in the overlap part."""
    return LAYER_BYTES if RATES[rate] >= SLOW else SLOW_LAYER_BYTES


# --- On the hosts --------------------------------------------------------------------------------------------------


def measure_sizes(wanted: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Ours on an ordinary array and in a bucket, and the MPI library's, in turn at each size."""
    import numpy as np
    from mpi4py import MPI

    import horo_lite as hvd
    from horo_lite.gradients import GradientBuckets

    comm = MPI.COMM_WORLD.Dup()
    found = []
    for size_bytes in wanted:
        elements = size_bytes // 4
        ours, library = (np.full(elements, 0, np.float32) for _ in range(2))
        buckets = GradientBuckets([("gradient", (elements,), "float32")], op=hvd.Sum, overlap=False)
        calls: dict[str, Callable[[], Any]] = {
            OURS: lambda array=ours: hvd.allreduce_(array, op=hvd.Sum),
            RESIDENT: lambda plan=buckets: (plan.ready(0), plan.finish()),
            LIBRARY: lambda array=library: comm.Allreduce(MPI.IN_PLACE, array),
        }
        found.append({"bytes": size_bytes, **medians(in_turn(calls, comm, rounds))})
        buckets.close()
    return found


def measure_overlap(rounds: int, layer_bytes: int) -> dict[str, float]:
    """A step's time with overlap, with its communication alone and with its compute alone, which are made equal."""
    from mpi4py import MPI

    import horo_lite as hvd
    from horo_lite.gradients import GradientBuckets

    comm = MPI.COMM_WORLD.Dup()
    parameters = [(f"layer{index}", (layer_bytes // 4,), "float32") for index in range(LAYERS)]

    def step(buckets: GradientBuckets, layer_s: float) -> None:
        for index in reversed(range(LAYERS)):  # as backward comes to them
            time.sleep(layer_s)
            buckets.ready(index)
        buckets.finish()

    plans = {
        "overlap": GradientBuckets(parameters, bucket_bytes=layer_bytes, overlap=True),
        "no overlap": GradientBuckets(parameters, bucket_bytes=layer_bytes, overlap=False),
    }
    comm.Barrier()
    step(plans["no overlap"], 0.0)
    alone = {"communication": lambda: step(plans["no overlap"], 0.0)}
    communication_s = medians(in_turn(alone, comm, rounds))["communication"]
    layer_s = communication_s / LAYERS
    times = in_turn(
        {
            **{name: lambda plan=plan: step(plan, layer_s) for name, plan in plans.items()},
            **alone,
            "compute": lambda: [time.sleep(layer_s) for _ in range(LAYERS)],
        },
        comm, rounds,
    )
    for plan in plans.values():
        plan.close()
    return {"ranks": float(hvd.size()), **medians(times)}


def inside(options: argparse.Namespace) -> None:
    """What each rank does; the first one leaves the results where the outer process finds them."""
    import horo_lite as hvd

    hvd.init()
    found: dict[str, Any] = {"sizes": measure_sizes(options.sizes, options.rounds)}
    if options.layer_bytes:
        found["overlap"] = measure_overlap(options.rounds, options.layer_bytes)
    if hvd.rank() == 0:
        options.inside.write_text(json.dumps(found))
    hvd.shutdown()


# --- Outside -------------------------------------------------------------------------------------------------------


def run_job(
    cluster: Cluster, rate: str, per_host: int, overlap: bool, options: argparse.Namespace
) -> dict[str, Any]:
    """One MPI job on the cluster.

    Raises:
        ClusterError: it failed or took far too long; carries its output.
    """
    wanted = [size for size in options.sizes if bound_s(size, rate) < LONGEST_CALL_S]
    rounds = options.rounds if RATES[rate] >= SLOW else min(options.rounds, SLOW_ROUNDS)
    step_s = bound_s(LAYERS * layer_bytes(rate), rate) if overlap else 0.0
    work_s = (rounds + 1) * (6 * sum(bound_s(size, rate) for size in wanted) + 8 * step_s)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [
            sys.executable, __file__, "--inside", str(answer), "--rounds", str(rounds),
            "--sizes", ",".join(map(str, wanted)), *(["--layer-bytes", str(layer_bytes(rate))] if overlap else []),
        ]
        done = cluster.run(
            command, HOSTS * per_host, per_host, limit_s=120 + 3 * work_s, mpirun=options.mpirun
        )
        if done.returncode != 0 or not answer.exists():
            raise ClusterError(f"the job at {rate}, {per_host} a host, ended with {done.returncode}:\n{done.stdout}")
        return json.loads(answer.read_text())  # type: ignore[no-any-return]


def show_rate(report: Report, rate: str, results: dict[int, list[dict[str, Any]]]) -> None:
    """The table of one rate: by ranks a host and size."""
    rows = []
    for per_host, sized in results.items():
        for of in sized:
            bound = bound_s(of["bytes"], rate)
            cells = [f"{seconds_text(of[name])}  {bound / of[name]:4.0%}" for name in (OURS, RESIDENT, LIBRARY)]
            rows.append([f"{per_host} x {bytes_text(of['bytes'])}", seconds_text(bound), *cells])
    report.table(
        f"All-reduce over {HOSTS} hosts at {rate}: time and share of the ring bound",
        ["ranks a host x size", "ring bound", OURS, RESIDENT, LIBRARY], rows,
    )


def judge_sizes(report: Report, results: dict[int, list[dict[str, Any]]]) -> None:
    """The targets on the share of the bound, and on two ranks a host against one."""
    large = {
        per_host: {of["bytes"]: of for of in sized if of["bytes"] >= JUDGED_BYTES}
        for per_host, sized in results.items()
    }
    for name in (OURS, RESIDENT):
        shares = [
            bound_s(size, JUDGED_RATE) / of[name] * 100 for size, of in large.get(1, {}).items()
        ]
        report.target(
            f"{JUDGED_RATE}, 1 MiB and more, {name}: worst share of the ring bound",
            min(shares, default=None), at_least=92, unit="%",
        )
    both = set(large.get(1, {})) & set(large.get(2, {}))
    longer = [large[2][size][OURS] / large[1][size][OURS] for size in both]
    report.target(
        f"{JUDGED_RATE}, two ranks a host over one, median over sizes",
        statistics.median(longer) if longer else None, at_most=1.05, unit="x",
    )


def show_overlap(report: Report, overlaps: dict[str, dict[str, float]]) -> None:
    """A step of compute and communication of equal length, at each rate."""
    names = ("compute", "communication", "no overlap", "overlap")
    report.table(
        f"A step of {LAYERS} layers over {HOSTS} hosts",
        ["link", "layer", *names, "overlap / max(compute, communication)"],
        [
            [
                rate, bytes_text(layer_bytes(rate)), *[seconds_text(of[name]) for name in names],
                f"{_over_longest(of):.2f}",
            ]
            for rate, of in overlaps.items()
        ],
    )
    judged = overlaps.get(JUDGED_RATE)
    report.target(
        f"{JUDGED_RATE}: a step with overlap over max(compute, communication)",
        None if judged is None else _over_longest(judged), at_most=1.15, unit="x",
    )


def _over_longest(of: dict[str, float]) -> float:
    return of["overlap"] / max(of["compute"], of["communication"])


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=lambda text: text.split(","), help=f"of {','.join(RATES)}")
    parser.add_argument("--sizes", type=sizes, help="for example 64KiB,16MiB")
    parser.add_argument("--per-host", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2],
                        help="ranks a host (default: 1,2)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each competitor")
    parser.add_argument("--quick", action="store_true", help="100mbit and 1 MiB only, fewer rounds")
    parser.add_argument("--mpirun", help="Hydra's launcher (default: the one beside this Python, or on PATH)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the CSV and PNG files")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--layer-bytes", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.rates = options.rates or ([JUDGED_RATE] if options.quick else list(RATES))
    options.sizes = options.sizes or ([JUDGED_BYTES] if options.quick else list(SIZES))
    if options.quick:
        options.rounds = min(options.rounds, 2)
    unknown = set(options.rates) - set(RATES)
    if unknown:
        parser.error(f"--rates {','.join(sorted(unknown))}: expected some of {','.join(RATES)}")
    return options


def main() -> None:
    """Measure, show, judge; the exit status is 1 when a target is missed, 0 where no cluster can be made."""
    options = parse()
    if options.inside:
        inside(options)
        return
    options.mpirun = options.mpirun or find_hydra()
    reason = why_unavailable() or ("" if options.mpirun else "mpiexec.hydra not found: pip install mpich")
    if reason:
        print(f"skipped: {reason}")
        return
    report = Report("cluster", options.output)
    records: list[dict[str, Any]] = []
    overlaps: dict[str, dict[str, float]] = {}
    shares: dict[str, list[tuple[float, float]]] = {}
    judged: dict[int, list[dict[str, Any]]] = {}
    with Cluster(HOSTS, options.rates[0]) as cluster:
        for rate in options.rates:
            cluster.shape(rate)
            results = {}
            for per_host in options.per_host:
                report.note(f"{rate}, {per_host} rank{'s' if per_host > 1 else ''} a host ...")
                found = run_job(cluster, rate, per_host, overlap=per_host == 1, options=options)
                results[per_host] = found["sizes"]
                overlaps.update({rate: found["overlap"]} if "overlap" in found else {})
                records += [{"rate": rate, "ranks_per_host": per_host, **of} for of in found["sizes"]]
            show_rate(report, rate, results)
            judged = results if rate == JUDGED_RATE else judged
            for of in results.get(1, []):
                for name in (OURS, LIBRARY):
                    share = bound_s(of["bytes"], rate) / of[name] * 100
                    shares.setdefault(f"{name}, {rate}", []).append((of["bytes"], share))
    judge_sizes(report, judged)
    if overlaps:
        show_overlap(report, overlaps)
        report.csv([{"rate": rate, **of} for rate, of in overlaps.items()], "overlap")
    report.csv(records)
    report.plot(
        f"All-reduce over {HOSTS} hosts, one rank each", "bytes", "% of the ring bound", shares, log_y=False
    )
    sys.exit(report.finish())


if __name__ == "__main__":
    main()
