"""What ``horo-lite doctor`` runs on two ranks: one all-reduce of every type through the public interface.

Rank 0 prints one line of JSON after a mark; the others are silent. ``result`` finds it again in what a job has printed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

_MARK = "horo-lite-selftest:"

TYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64",
    "complex128",
)
_REPEATS = 50
_ENOUGH_S = 0.5  # repeats end here on a slow network
_ELEMENTS = 1 << 20


def _works(hvd: object, name: str) -> str:
    """"ok", or what went wrong with this type."""
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)
    mine = np.ones(3, dtype)
    got = hvd.allreduce(mine, op=hvd.Sum, name=f"selftest.{name}")  # type: ignore[attr-defined]
    expected = np.ones(3) * (1 if name == "bool" else hvd.size())  # type: ignore[attr-defined]
    if got.dtype != dtype:
        return f"became {got.dtype}"
    return "ok" if np.array_equal(got.astype(expected.dtype), expected) else f"gave {got.tolist()}"


def _median_s(hvd: object, work: Callable[[], object]) -> float:
    def once_s() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    once_s()  # the first one makes connections, and measures which algorithm suits
    slowest_s = hvd.allreduce(np.array(once_s()), op=hvd.Max, name="selftest.time")  # type: ignore[attr-defined]
    repeats = int(np.clip(_ENOUGH_S / slowest_s, 1, _REPEATS))  # the same on both ranks
    return float(np.median([once_s() for _ in range(repeats)]))


def _measure(hvd: object) -> dict[str, object]:
    """Times of a small and a large all-reduce and of a bucket, and the ways that they take."""
    from horo_lite import context
    from horo_lite.gradients import GradientBuckets

    def reduce(array: np.ndarray) -> None:
        hvd.allreduce(array, op=hvd.Sum, name=f"selftest.{array.size}")  # type: ignore[attr-defined]

    def step() -> None:
        buckets.ready(0)
        buckets.finish()

    small, large = np.ones(256, np.float32), np.ones(_ELEMENTS, np.float32)
    latency_s, large_s = _median_s(hvd, lambda: reduce(small)), _median_s(hvd, lambda: reduce(large))
    buckets = GradientBuckets([("selftest", (_ELEMENTS,), "float32")])
    before = hvd.wire_stats().shared_bytes  # type: ignore[attr-defined]
    bucket_s = _median_s(hvd, step)
    shared = hvd.wire_stats().shared_bytes > before  # type: ignore[attr-defined]
    buckets.close()
    lane = context.current().members[0].lane
    return {
        "latency_s": latency_s,
        "bytes_per_s": large.nbytes / large_s,
        "bucket_bytes_per_s": large.nbytes / bucket_s,
        "shared_memory": shared,
        "choices": lane.choices() if lane is not None else "",
    }


def result(output: str) -> dict[str, Any] | None:
    """What rank 0 has reported, among whatever else a job has printed; None when it did not come so far."""
    lines = [line for line in output.splitlines() if line.startswith(_MARK)]
    return json.loads(lines[0].removeprefix(_MARK)) if len(lines) == 1 else None


def cause(output: str) -> str:
    """The line that says most: a Python error, for launchers bury it under notices of their own."""
    lines = [line.strip(" -=") for line in output.splitlines() if line.strip(" -=")]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it said nothing"])[-1]


def main() -> int:
    """Run the test; the exit status is 1 when a type does not work."""
    import horo_lite as hvd

    hvd.init()
    types = {}
    for name in TYPES:
        try:
            types[name] = _works(hvd, name)
        except (hvd.HoroLiteError, TypeError, ValueError) as error:
            types[name] = f"{type(error).__name__}: {error}"
    report = {
        "size": hvd.size(),
        "threads": bool(hvd.mpi_threads_supported()),
        "types": types,
        **_measure(hvd),
    }
    if hvd.rank() == 0:
        sys.stdout.write(f"{_MARK}{json.dumps(report)}\n")
        sys.stdout.flush()
    hvd.shutdown()
    return 0 if all(state == "ok" for state in types.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
