"""Where horo_lite's own lines go: to standard error, tagged with the rank, unless the program logs by itself."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

logger = logging.getLogger("horo_lite")


class _Tagged(logging.Handler):
    """Used as long as the program has set up no handlers."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self._rank = rank if size > 1 else None

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            write_tagged(self._rank, f"horo_lite: {self.format(record)}")


def set_up(level: str, rank: int, size: int) -> None:
    """Called by ``init()``, once the rank is known."""
    logger.setLevel(level.upper())
    for handler in [h for h in logger.handlers if isinstance(h, _Tagged)]:
        logger.removeHandler(handler)
    logger.addHandler(_Tagged(rank, size))
    if size > 1:
        # A launcher reads from a pipe, into which Python writes 8 KiB at a time, so that what a killed rank printed
        # would be lost, or with PYTHONUNBUFFERED each word by itself, so that ranks' lines would mix.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # the program has put something else there
                stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]


def write_tagged(rank: int | None, text: str) -> None:
    """Write lines to standard error in one piece, each tagged with the rank, after what was printed before."""
    tag = "" if rank is None else f"[rank {rank}] "
    tagged = "".join(f"{tag}{line}\n" for line in text.rstrip("\n").split("\n"))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()
    try:
        sys.stderr.write(tagged)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        with contextlib.suppress(OSError):
            os.write(2, tagged.encode(errors="replace"))
