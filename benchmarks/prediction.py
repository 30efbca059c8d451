"""Does the simulator tell how long an all-reduce takes on a real network? Predicted against measured, on four hosts.

    python benchmarks/prediction.py                     # ring and hierarchical, one and two ranks a host; needs root
    python benchmarks/prediction.py --algorithms halving_doubling --rate 10mbit --sizes 256KiB

The hosts are network namespaces with shaped links. What the simulator knows of them was measured on messages between
two ranks and on arithmetic alone; nothing is fitted to an all-reduce. Ranks and simulator carry out the same schedules.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from support.netns import Cluster, ClusterError, find_hydra, why_unavailable
from support.options import sizes
from support.report import RESULTS, Report, bytes_text, seconds_text
from support.timing import in_turn, medians

from horo_lite.arrays import ArrayKernel, kernel
from horo_lite.collectives.registry import algorithm
from horo_lite.interfaces import (
    Array,
    Group,
    Kernel,
    Recv,
    Reduction,
    Schedule,
    Send,
    Transport,
    Wait,
)
from horo_lite.transport.driver import run
from horo_lite.transport.network_model import NetworkModel
from horo_lite.transport.simulator import Simulator

HOSTS = 4
RATE = "100mbit"
SIZES = (1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20)
ALGORITHMS = ("ring", "hierarchical")
WITHIN_PERCENT = 25.0

ROUND_TRIPS, POSTS, REPEATS = 100, 32, 5
BURST_BYTES = 512 << 10  # more than a shaper lets through at once after the link was idle
STREAM_BYTES = 2 << 20
ARITHMETIC_BYTES = 1 << 20  # a segment's


def arithmetic(ranks: int) -> ArrayKernel:
    """The kernel of all all-reduces here."""
    return kernel("float32", Reduction.SUM, ranks)


def all_reduce(name: str, rank: int, ranks: int, per_host: int, buffer: Array, of: Kernel) -> Schedule:
    """One rank's schedule, for the real network and for the simulated one."""
    nodes = [tuple(range(first, first + per_host)) for first in range(0, ranks, per_host)]
    return algorithm("allreduce", name)(Group.whole(rank, ranks), buffer, of, nodes=nodes)


# --- On the hosts --------------------------------------------------------------------------------------------------


class Pair:
    """Messages between rank 0 and one other rank; each method is called by both, and rank 0's answer counts."""

    def __init__(self, transport: Transport, partner: int) -> None:
        self._transport = transport
        self._first = transport.rank == 0
        self._peer = partner if self._first else 0

    def message_s(self, buffer: Array) -> float:
        """The time until a message of rank 0 is known to have arrived."""

        def there_and_back() -> Schedule:
            for goes in (buffer, buffer[:0]):
                outwards = self._first == (goes is buffer)
                yield Wait([(yield (Send if outwards else Recv)(goes, self._peer))])

        return self._timed(there_and_back())

    def round_trip_s(self) -> float:
        """There and back with an empty message."""
        empty = np.empty(0, np.uint8)
        return statistics.median(self.message_s(empty) for _ in range(ROUND_TRIPS))

    def bandwidth(self) -> float:
        """Bytes per second of a stream in one direction, once the link has given what it gives at once."""
        burst, stream = np.zeros(BURST_BYTES, np.uint8), np.zeros(STREAM_BYTES, np.uint8)
        round_trip_s = self.round_trip_s()
        times = []
        for _ in range(REPEATS):
            self.message_s(burst)
            times.append(self.message_s(stream))
        return STREAM_BYTES / (statistics.median(times) - round_trip_s)

    def overhead_s(self) -> float:
        """The processor's time to begin one message, however long it is under way."""
        empty = np.empty(0, np.uint8)
        posted_s = []

        def post() -> Schedule:
            start = time.perf_counter()
            tokens = []
            for _ in range(POSTS):
                tokens.append((yield (Send if self._first else Recv)(empty, self._peer)))
            posted_s.append((time.perf_counter() - start) / POSTS)
            yield Wait(tokens)

        for _ in range(REPEATS):
            run(post(), self._transport)
            self.message_s(empty)  # the two stay together
        return min(posted_s)  # the scheduler's whims are part of no message

    def _timed(self, schedule: Schedule) -> float:
        start = time.perf_counter()
        run(schedule, self._transport)
        return time.perf_counter() - start


def measure_parameters(transport: Transport, per_host: int) -> dict[str, float]:
    """What the simulator is told of this network, on rank 0; the ranks that look on use no core."""
    found: dict[str, float] = {}
    partners = {"": per_host, **({"local_": 1} if per_host > 1 else {})}
    for prefix, partner in partners.items():
        if transport.rank in (0, partner):
            pair = Pair(transport, partner)
            found.setdefault("overhead_s", pair.overhead_s())
            # A latency is of the wire alone: both sides' work for a message is counted apart from it.
            found[f"{prefix}latency_s"] = max(pair.round_trip_s() / 2 - 2 * found["overhead_s"], 1e-7)
            found[f"{prefix}bandwidth"] = pair.bandwidth()
        run(fence(transport), transport)
    rates = arithmetic_rates(transport.size)  # on all ranks at once, which share the machine's cores
    run(fence(transport), transport)
    return {**found, **rates}


def fence(transport: Transport) -> Schedule:
    """All ranks meet."""
    return algorithm("barrier", "dissemination")(Group.whole(transport.rank, transport.size))


class Meeting:
    """What ``in_turn`` asks of a communicator, without its spinning: ranks share cores here, and one that spins while
    it waits for the start keeps the others from theirs.
    """

    def __init__(self, transport: Transport, comm: Any) -> None:
        self._transport = transport
        self.allgather = comm.allgather

    def Barrier(self) -> None:
        run(fence(self._transport), self._transport)


def arithmetic_rates(ranks: int) -> dict[str, float]:
    """Bytes of input per second that this rank adds and copies."""
    of = arithmetic(ranks)
    a, b = (np.ones(ARITHMETIC_BYTES // 4, np.float32) for _ in range(2))

    def rate(call: Callable[[], None], input_bytes: int) -> float:
        times = []
        for _ in range(REPEATS + 1):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return input_bytes / statistics.median(times[1:])

    return {
        "reduce_rate": rate(lambda: of.combine(a, (a, b)), a.nbytes + b.nbytes),
        "copy_rate": rate(lambda: of.copy(a, b), b.nbytes),
    }


def inside(options: argparse.Namespace) -> None:
    """What each rank does; the first one leaves the results where the outer process finds them."""
    from mpi4py import MPI

    from horo_lite.config import Config
    from horo_lite.transport.mpi_world import MPIWorld

    transport = MPIWorld(Config()).transport()
    rank, ranks, per_host = transport.rank, transport.size, options.per_host[0]
    found: dict[str, Any] = {"parameters": measure_parameters(transport, per_host), "measured": {}}
    of, comm = arithmetic(ranks), Meeting(transport, MPI.COMM_WORLD)
    for size_bytes in options.sizes:
        buffer = np.zeros(size_bytes // 4, np.float32)
        calls = {
            name: lambda name=name, buffer=buffer: run(
                all_reduce(name, rank, ranks, per_host, buffer, of), transport
            )
            for name in options.algorithms
        }
        found["measured"][size_bytes] = medians(in_turn(calls, comm, options.rounds))
    if rank == 0:
        options.inside.write_text(json.dumps(found))


# --- Outside -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """One all-reduce, as measured and as predicted."""

    per_host: int
    algorithm: str
    size_bytes: int
    measured_s: float
    predicted_s: float

    @property
    def ratio(self) -> float:
        return self.predicted_s / self.measured_s

    @property
    def off_percent(self) -> float:
        return abs(self.ratio - 1) * 100


def predict_s(name: str, size_bytes: int, per_host: int, network: NetworkModel) -> float:
    """The virtual time of one all-reduce."""
    ranks = HOSTS * per_host
    simulator = Simulator(ranks, network)
    of = simulator.timed(arithmetic(ranks))
    buffers = [np.zeros(size_bytes // 4, np.float32) for _ in range(ranks)]
    return simulator.run(lambda rank: all_reduce(name, rank, ranks, per_host, buffers[rank], of)).elapsed_s


def run_job(cluster: Cluster, per_host: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure on the cluster.

    Raises:
        ClusterError: the job failed; carries its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [
            sys.executable, __file__, "--inside", str(answer), "--rounds", str(options.rounds),
            "--sizes", ",".join(map(str, options.sizes)), "--algorithms", ",".join(options.algorithms),
            "--per-host", str(per_host),
        ]
        done = cluster.run(command, HOSTS * per_host, per_host, limit_s=options.limit_s, mpirun=options.mpirun)
        if done.returncode != 0 or not answer.exists():
            raise ClusterError(f"the job with {per_host} a host ended with {done.returncode}:\n{done.stdout}")
        return json.loads(answer.read_text())  # type: ignore[no-any-return]


def compare(per_host: int, found: dict[str, Any]) -> Iterator[Case]:
    """Every measurement with its prediction."""
    network = NetworkModel(ranks_per_node=per_host, **found["parameters"])
    for size, measured in found["measured"].items():
        for name, measured_s in measured.items():
            yield Case(per_host, name, int(size), measured_s, predict_s(name, int(size), per_host, network))


def show_parameters(report: Report, found: dict[int, dict[str, Any]]) -> None:
    """What was measured on pairs of ranks, and on arithmetic."""
    names = list(dict.fromkeys(name for of in found.values() for name in of["parameters"]))

    def text(name: str, value: float | None) -> str | None:
        if value is None:
            return None
        return seconds_text(value) if name.endswith("_s") else f"{value / 1e6:.4g} MB/s"

    report.table(
        "Parameters", ["ranks a host", *names],
        [
            [str(per_host), *[text(name, of["parameters"].get(name)) for name in names]]
            for per_host, of in found.items()
        ],
    )


def show(report: Report, cases: list[Case], rate: str) -> None:
    """The table, the files and the verdicts."""
    report.table(
        f"All-reduce over {HOSTS} hosts at {rate}", ["ranks a host, algorithm, size", "measured", "predicted", "ratio"],
        [
            [
                f"{case.per_host} x {case.algorithm}, {bytes_text(case.size_bytes)}",
                seconds_text(case.measured_s), seconds_text(case.predicted_s), f"{case.ratio:.2f}",
            ]
            for case in cases
        ],
    )
    report.csv([{**dataclasses.asdict(case), "ratio": case.ratio} for case in cases])
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(f"{case.algorithm}, {case.per_host} a host", []).append(case)
    for name, group in groups.items():
        worst = max(group, key=lambda case: case.off_percent)
        report.target(f"{name}: prediction off by", worst.off_percent, at_most=WITHIN_PERCENT, unit="%")
    report.plot(
        f"All-reduce over {HOSTS} hosts at {rate}", "bytes", "predicted time over measured time",
        {name: [(case.size_bytes, case.ratio) for case in group] for name, group in groups.items()}, log_y=False,
    )


def parse() -> argparse.Namespace:
    """The options."""
    names = functools.partial(str.split, sep=",")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default=RATE, help=f"of every link, as tc writes it (default: {RATE})")
    parser.add_argument("--sizes", type=sizes, default=SIZES, help="for example 1MiB,16MiB")
    parser.add_argument("--algorithms", type=names, default=list(ALGORITHMS), help=f"default: {','.join(ALGORITHMS)}")
    parser.add_argument("--per-host", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2],
                        help="ranks a host (default: 1,2)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each all-reduce")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of one job")
    parser.add_argument("--mpirun", help="Hydra's launcher (default: the one beside this Python, or on PATH)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the CSV and PNG files")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure, predict, judge; the exit status is 1 when a prediction is far off, 0 where no cluster can be made."""
    options = parse()
    if options.inside:
        inside(options)
        return
    options.mpirun = options.mpirun or find_hydra()
    reason = why_unavailable() or ("" if options.mpirun else "mpiexec.hydra not found: pip install mpich")
    if reason:
        print(f"skipped: {reason}")
        return
    report = Report("prediction", options.output)
    found = {}
    with Cluster(HOSTS, options.rate) as cluster:
        for per_host in options.per_host:
            found[per_host] = run_job(cluster, per_host, options)
    cases = [case for per_host in found for case in compare(per_host, found[per_host])]
    show_parameters(report, found)
    show(report, cases, options.rate)
    sys.exit(report.finish())


if __name__ == "__main__":
    main()
