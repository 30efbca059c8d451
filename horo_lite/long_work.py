"""For work that one rank does while the others wait for it: a checkpoint, a download, a validation on rank 0."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from horo_lite.context import current
from horo_lite.functions import barrier
from horo_lite.process_sets import ProcessSet, global_process_set


@contextlib.contextmanager
def long_work() -> Iterator[None]:
    """What this rank does inside may take as long as it likes: others that wait for it neither warn nor end the job.

    ::

        with hvd.long_work():
            model.compile_for_an_hour()
    """
    watch = current().watch
    if watch is None:
        yield
        return
    watch.busy += 1
    try:
        yield
    finally:
        watch.busy -= 1


@contextlib.contextmanager
def rank0_first(process_set: ProcessSet = global_process_set) -> Iterator[None]:
    """The first rank of the process set goes through the block alone, then all others do.

    ::

        with hvd.rank0_first():
            dataset = download("data")      # the others find it there

    Args:
        process_set: the ranks that go through it.
    """
    first = process_set.rank() == 0
    if not first:
        barrier(process_set)
    try:
        with long_work() if first else contextlib.nullcontext():
            yield
    finally:
        if first:
            barrier(process_set)
