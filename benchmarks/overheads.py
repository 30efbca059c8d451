"""What the package costs where no bytes matter: a small call, its import, its start, waiting, memory.

    python benchmarks/overheads.py [--quick]
    mpirun -np 2 python benchmarks/overheads.py

Against Gloo (through torch.distributed) and the MPI library where they have the same thing.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.competitors import GLOO, LIBRARY, OURS, Competitors
from support.launch import leave, on_ranks
from support.report import RESULTS, Report, seconds_text
from support.timing import in_turn, medians, ratio

CALL_BYTES = 1 << 10
FRONT_ENDS = {
    "horo_lite": "numpy", "horo_lite.torch": "torch", "horo_lite.tensorflow": "tensorflow", "horo_lite.keras": "keras",
}
"""What is imported, and what its user has imported anyway."""

_TIME_IMPORT = """
import importlib, sys, time
importlib.import_module(sys.argv[2])
start = time.perf_counter()
importlib.import_module(sys.argv[1])
print(time.perf_counter() - start)
"""


def wait_patiently(comm: Any) -> None:
    """A barrier that leaves the core to the ranks that still measure something."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.01)


def import_s(front_end: str, framework: str, children: int) -> float | None:
    """The median import time of a front end in fresh processes, beyond its framework's; None without the framework."""
    if importlib.util.find_spec(framework) is None:
        return None
    command = [sys.executable, "-c", _TIME_IMPORT, front_end, framework]
    times = []
    for _ in range(children):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{front_end} cannot be imported:\n{done.stderr}")
        times.append(float(done.stdout.split()[-1]))
    return statistics.median(times)


def report_imports(report: Report, comm: Any, quick: bool) -> None:
    """Import times on the first rank, while the others sleep."""
    if comm.Get_rank() == 0:
        chosen = dict(list(FRONT_ENDS.items())[:2]) if quick else FRONT_ENDS
        times = {name: import_s(name, of, children=1 if quick else 5) for name, of in chosen.items()}
        report.table(
            "Import beyond the framework's own", ["module", "time"],
            [[name, None if taken is None else seconds_text(taken)] for name, taken in times.items()],
        )
        for name, taken in times.items():
            report.target(f"import {name}", taken, at_most=0.3, unit="s")
    wait_patiently(comm)


def report_call(report: Report, comm: Any, hvd: Any, rounds: int) -> None:
    """A synchronous all-reduce of 1 KiB, which the ranks agree on by name, type and shape before they do it."""
    competitors = Competitors(hvd, comm)
    calls = competitors.calls(CALL_BYTES // 4, "float32")
    times = in_turn({name: calls[name] for name in (OURS, LIBRARY, GLOO) if name in calls}, comm, rounds, calls=100)
    competitors.close()
    competitors.finish()
    found = medians(times)
    report.table(
        f"Synchronous all-reduce of 1 KiB, {comm.Get_size()} ranks",
        ["", "time", "in the quickest round", f"times {OURS}"],
        [
            [name, seconds_text(seconds), seconds_text(min(times[name])), f"{ratio(times, name, OURS):.2f}"]
            for name, seconds in found.items()
        ],
    )
    report.csv([{"competitor": name, "seconds": seconds} for name, seconds in found.items()], "call")
    report.target(
        "1 KiB call with agreement, 2 ranks", found[OURS] * 1e6 if comm.Get_size() == 2 else None, at_most=40, unit="us"
    )


def share_of_a_core(call: Callable[[], Any]) -> float:
    """Processor time over wall time of all of this process's threads during a call."""
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return (time.process_time() - processor) / (time.perf_counter() - wall)


def report_waiting(report: Report, comm: Any, hvd: Any, late_s: float) -> None:
    """What a rank burns while it waits for a late one, and while nothing is under way."""
    import torch

    tensor = torch.zeros(256)
    wait_patiently(comm)
    if hvd.rank() == 0:
        waiting = share_of_a_core(lambda: hvd.allreduce(tensor, name="late"))
    else:
        time.sleep(late_s)
        hvd.allreduce(tensor, name="late")
        waiting = 0.0
    idle = max(comm.allgather(share_of_a_core(lambda: time.sleep(late_s))))
    report.table(
        f"Processor time over {late_s:g} s", ["", "share of a core"],
        [["a rank that waits for a late one", f"{waiting:.1%}"], ["a rank with nothing to do", f"{idle:.1%}"]],
    )
    report.target("a rank that waits for a late one", waiting * 100, at_most=10, unit="% of a core")


def memory_bytes() -> int | None:
    """This process's memory, pages shared with other ranks divided among them (Linux's Pss); None elsewhere."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def report_memory(report: Report, comm: Any, hvd: Any, steps: int, gradient_bytes: int) -> None:
    """Growth over many steps, and what a rank has of its gradients beside the gradients."""
    import torch

    from horo_lite.gradients import GradientBuckets

    before = memory_bytes()
    if before is None:
        report.note("memory is not measured: no /proc/self/smaps_rollup on this system")
        return
    count = 8
    shape = (gradient_bytes // 4 // count,)
    buckets = GradientBuckets([(f"layer{i}", shape, "float32") for i in range(count)], op=hvd.Average)
    plain = torch.ones(4096)

    def step(elements: int) -> None:
        for index, view in enumerate(buckets.views):
            view[:elements] = 1.0
            buckets.ready(index)
        buckets.finish()
        hvd.allreduce(plain, name="loss")

    step(shape[0])
    comm.Barrier()
    copies = max(comm.allgather((memory_bytes() or 0) - before)) / gradient_bytes
    comm.Barrier()
    for _ in range(20):
        step(1)
    comm.Barrier()
    warm = memory_bytes() or 0
    for _ in range(steps):
        step(1)
    comm.Barrier()
    growth = max(comm.allgather((memory_bytes() or 0) - warm)) / (1 << 20)
    buckets.close()
    report.table(
        "Memory of a rank", ["", ""],
        [
            ["gradients in buckets, over the gradients' own size", f"{copies:.2f}"],
            [f"growth over {steps} steps", f"{growth:.2f} MiB"],
        ],
    )
    one_node = hvd.local_size() == hvd.size()
    report.target("memory for gradients on one node", copies if one_node else None, at_most=1.25, unit="x their size")
    report.target("growth over 1,000 steps", growth if steps >= 1000 else None, at_most=1.0, unit="MiB")


def main() -> None:
    """Measure, show, judge; the exit status is 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and steps")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the CSV files")
    options = parser.parse_args()
    on_ranks(2)
    from mpi4py import MPI  # initialises: what comes after is beyond MPI's own start

    import horo_lite.torch as hvd

    comm = MPI.COMM_WORLD.Dup()
    comm.Barrier()
    start = time.perf_counter()
    hvd.init()
    init_s = max(comm.allgather(time.perf_counter() - start))
    report = Report("overheads", options.output, writes=hvd.rank() == 0)
    report.note(f"init() beyond MPI's own start, {hvd.size()} ranks: {seconds_text(init_s)}")
    report.target("init() beyond MPI's own, 2 ranks", init_s if hvd.size() == 2 else None, at_most=0.5, unit="s")
    report_imports(report, comm, options.quick)
    report_call(report, comm, hvd, rounds=5 if options.quick else 21)
    report_waiting(report, comm, hvd, late_s=1.0 if options.quick else 5.0)
    steps, gradient_bytes = (50, 16 << 20) if options.quick else (1000, 64 << 20)
    report_memory(report, comm, hvd, steps, gradient_bytes)
    status = report.finish()
    hvd.shutdown()
    leave(status)


if __name__ == "__main__":
    main()
