"""Python objects from one rank or from all, pickled by cloudpickle: gathers of bytes."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np

from horo_lite.context import current
from horo_lite.engine.operations import AllGather, Operation
from horo_lite.errors import ArgumentTypeError
from horo_lite.functions.arguments import checked_root
from horo_lite.functions.submission import call
from horo_lite.process_sets import Member, ProcessSet, global_process_set


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Give every rank the root's Python object.

    Args:
        obj: anything that cloudpickle takes; only the root's counts.
        root_rank: a global rank.
        name: what it is matched by.
        process_set: the ranks that take part.

    Returns:
        On the root the object itself, elsewhere a copy.

    Raises:
        ValueError: ``root_rank`` is not in the process set.
        TypeError: the root's object can't be pickled; the other ranks raise a DisagreementError.
    """
    label = name or "broadcast_object"
    is_root = current().rank == root_rank

    def make(member: Member) -> Operation:
        root = checked_root(root_rank, member)
        # Only the root has rows, so that the length needs no message of its own.
        packed = _packed(obj, root) if is_root else np.empty(0, np.uint8)
        return AllGather([packed], label, root_rank=root)

    received = call(process_set, "allgather", label, make)
    return obj if is_root else cloudpickle.loads(received.tobytes())[1]


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's Python object, in rank order.

    Args:
        obj: anything that cloudpickle takes.
        name: what it is matched by.
        process_set: the ranks that take part.

    Raises:
        TypeError: this rank's object can't be pickled; the other ranks raise a DisagreementError.
    """
    label = name or "allgather_object"

    def make(_: Member) -> Operation:
        packed = _packed(obj)
        return AllGather([np.array([len(packed)], np.int64), packed], label, grouped=True)

    lengths, packed = call(process_set, "allgather", label, make)
    received = packed.tobytes()
    objects, start = [], 0
    for length in lengths:
        objects.append(cloudpickle.loads(received[start : start + int(length)]))
        start += int(length)
    return objects


def _packed(obj: Any, root: int | None = None) -> Any:
    """A Python object, after the root's number if it has one, as an array of bytes."""
    try:
        return np.frombuffer(cloudpickle.dumps(obj if root is None else (root, obj)), np.uint8)
    except Exception as error:
        raise ArgumentTypeError(f"an object of type {type(obj).__name__} can't be sent: {error}") from error
