"""Where horo_lite's own lines go: to standard error, tagged with the rank, unless the program logs by itself."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("horo_lite")


class _Tagged(logging.Handler):
    """Used as long as the program has set up no handlers; looks up ``sys.stderr`` anew each time, as notebooks need."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self._tag = f"[rank {rank}] " if size > 1 else ""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or sys.stderr is None:
            return
        try:
            sys.stderr.write(f"{self._tag}horo_lite: {record.getMessage()}\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # closed: there is nowhere to say it
            pass


def set_up(level: str, rank: int, size: int) -> None:
    """Called by ``init()``, once the rank is known."""
    logger.setLevel(level.upper())
    for handler in [h for h in logger.handlers if isinstance(h, _Tagged)]:
        logger.removeHandler(handler)
    logger.addHandler(_Tagged(rank, size))
