"""Records what the engine does, as a Chrome trace (chrome://tracing, Perfetto) with Horovod's event names.

One row per tensor: ``NEGOTIATE_ALLREDUCE`` until all ranks have asked for it, then ``ALLREDUCE`` until it is done;
buckets have ``QUEUE`` in the negotiation's place. Recorded on rank 0, whose negotiation covers the others' delays.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from horo_lite.errors import ArgumentError
from horo_lite.log import logger


class Timeline:
    """A trace being written.

    Args:
        path: the file; an existing one is replaced.
        mark_cycles: also mark each round of the engine in which something moved (``CYCLE_START``).

    Raises:
        ArgumentError: the file can't be written.
    """

    def __init__(self, path: str, mark_cycles: bool = False) -> None:
        self.mark_cycles = mark_cycles
        try:
            self._file: TextIO | None = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  (closed by close())
        except OSError as error:
            raise ArgumentError(f"the timeline can't be written: {error}") from error
        self._rows: dict[str, int] = {}
        self._lock = threading.Lock()
        self._started = time.perf_counter()
        self._file.write("[\n")
        self._write(
            {
                "name": "start_time_since_epoch_in_micros", "ph": "M", "pid": 0,
                "args": {"start_time_since_epoch_in_micros": time.time_ns() // 1000},
            }
        )

    def begin(self, tensor: str, activity: str) -> None:
        """``tensor`` enters a phase; ends the one it was in."""
        self._write({"name": activity, "ph": "B", "ts": self._now(), "pid": self._row(tensor)})

    def end(self, tensor: str) -> None:
        """The phase that ``tensor`` entered last is over."""
        self._write({"ph": "E", "ts": self._now(), "pid": self._row(tensor)})

    def cycle(self) -> None:
        """A round of the engine begins."""
        self._write({"name": "CYCLE_START", "ph": "i", "ts": self._now(), "pid": 0, "s": "g"})

    def close(self) -> None:
        """Finish the file; later events are dropped."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            _written(lambda: file.write("{}]\n"))
            _written(file.close)

    def _row(self, tensor: str) -> int:
        row = self._rows.get(tensor)
        if row is None:
            row = self._rows[tensor] = len(self._rows) + 1
            self._write({"name": "process_name", "ph": "M", "pid": row, "args": {"name": tensor}})
            self._write({"name": "process_sort_index", "ph": "M", "pid": row, "args": {"sort_index": row}})
        return row

    def _now(self) -> int:
        return int((time.perf_counter() - self._started) * 1e6)

    def _write(self, event: dict[str, Any]) -> None:
        with self._lock:
            file = self._file
            if file is not None and not _written(lambda: file.write(json.dumps(event) + ",\n")):
                self._file = None


def _written(write: Callable[[], object]) -> bool:
    """Whether it went well; training goes on without a trace where a disk is full."""
    try:
        write()
    except OSError as error:
        logger.warning("the timeline ends here: %s", error)
        return False
    return True
