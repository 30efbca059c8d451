"""What ``horo-lite doctor`` runs on two ranks: one all-reduce of every type through the public interface.

Rank 0 prints one line of JSON after ``MARK``; the others are silent.
"""

from __future__ import annotations

import json
import sys
import time

import ml_dtypes
import numpy as np

MARK = "horo-lite-selftest:"

TYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64",
    "complex128",
)
_REPEATS = 50
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


def _median_s(hvd: object, array: np.ndarray) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        hvd.allreduce(array, op=hvd.Sum, name=f"selftest.{array.size}")  # type: ignore[attr-defined]
        times.append(time.perf_counter() - start)
    return float(np.median(times))


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
    result = {
        "size": hvd.size(),
        "threads": bool(hvd.mpi_threads_supported()),
        "types": types,
        "latency_s": _median_s(hvd, np.ones(256, np.float32)),
        "bytes_per_s": _ELEMENTS * 4 / _median_s(hvd, np.ones(_ELEMENTS, np.float32)),
    }
    if hvd.rank() == 0:
        sys.stdout.write(f"{MARK}{json.dumps(result)}\n")
        sys.stdout.flush()
    hvd.shutdown()
    return 0 if all(state == "ok" for state in types.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
