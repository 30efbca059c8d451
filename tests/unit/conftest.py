"""What unit tests share."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """What is imported by now stays; with a framework that is a million objects, which no collection need look at."""
    gc.collect()
    gc.freeze()
