"""Where ranks meet without data: barrier and join."""

from __future__ import annotations

from horo_lite.engine.operations import Barrier, Join
from horo_lite.functions.submission import call
from horo_lite.process_sets import ProcessSet, global_process_set


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set has called it.

    Args:
        process_set: the ranks that wait for one another.
    """
    call(process_set, "barrier", None, lambda _: Barrier(""))


def join(device: int = -1) -> int:
    """This rank is out of data: take part in whatever the others do until all ranks have joined.

    It contributes zeros to Sum and Average (which still divides by all ranks), the identity to Min, Max and
    Product, and no rows to gathers. A broadcast from a joined rank is an error on all ranks.

    Args:
        device: not needed; accepted as in Horovod.

    Returns:
        The global rank that joined last.
    """
    planned = global_process_set.member().planned
    if planned is not None:
        planned.joined = True
    try:
        done = 0 if planned is None else planned.submitted
        last = int(call(global_process_set, "join", None, lambda _: Join(done)))
    finally:
        if planned is not None:
            planned.joined, planned.submitted = False, 0
    barrier()  # or the next step of a fast rank would be followed with zeros by one that has not come back yet
    return last
