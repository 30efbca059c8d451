"""What moves values and computes nothing: all-gather, broadcast, all-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horo_lite.engine import Handle
from horo_lite.engine.operations import AllGather, AllToAll, Broadcast, Operation
from horo_lite.functions.arguments import as_tensor, checked_root, checked_splits, with_rows
from horo_lite.functions.submission import Make, call, start
from horo_lite.process_sets import Member, ProcessSet, global_process_set

# --- All-gather --------------------------------------------------------------------------------------------------


def _make_allgather(tensors: Sequence[Any], name: str | None, grouped: bool) -> Make:
    return lambda _: AllGather([as_tensor(tensor) for tensor in tensors], name or "", grouped)


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to concatenate every rank's tensor. See ``allgather``."""
    return start(process_set, "allgather", name, _make_allgather([tensor], name, False))


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate every rank's tensor along the first dimension, in rank order.

    Args:
        tensor: shape (rows, ...); rows may differ between ranks. A 0-d tensor counts as one row.
        name: what it is matched by; without one, the k-th unnamed call of each rank belongs together.
        process_set: the ranks that take part.

    Returns:
        A tensor of shape (sum of all rows, ...).

    Raises:
        DisagreementError: ranks passed different types or trailing dimensions; on every rank.
    """
    return call(process_set, "allgather", name, _make_allgather([tensor], name, False))


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to gather several tensors as one unit. See ``allgather``."""
    return start(process_set, "allgather", name, _make_allgather(tensors, name, True))


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gather several tensors as one unit; returns a list. See ``allgather``."""
    return call(process_set, "allgather", name, _make_allgather(tensors, name, True))


# --- Broadcast ---------------------------------------------------------------------------------------------------


def _make_broadcast(tensor: Any, root_rank: int, name: str | None, in_place: bool) -> Make:
    def make(member: Member) -> Operation:
        root = checked_root(root_rank, member)
        return Broadcast(tensor if in_place else as_tensor(tensor), name or "", root, in_place)

    return make


def broadcast_async(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to give every rank the root's tensor. See ``broadcast``."""
    return start(process_set, "broadcast", name, _make_broadcast(tensor, root_rank, name, False))


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Give every rank the root's tensor.

    Args:
        tensor: the same shape and type on every rank; only the root's values count.
        root_rank: a global rank, in a process set as well.
        name: what it is matched by; without one, the k-th unnamed call of each rank belongs together.
        process_set: the ranks that take part.

    Returns:
        A new tensor.

    Raises:
        ValueError: ``root_rank`` is not in the process set.
        DisagreementError: ranks passed different roots, shapes or types; on every rank.
    """
    return call(process_set, "broadcast", name, _make_broadcast(tensor, root_rank, name, False))


def broadcast_async_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to give every rank the root's tensor, in place. See ``broadcast``."""
    return start(process_set, "broadcast", name, _make_broadcast(tensor, root_rank, name, True))


def broadcast_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Give every rank the root's tensor, in place, and return it. See ``broadcast``."""
    return call(process_set, "broadcast", name, _make_broadcast(tensor, root_rank, name, True))


# --- All-to-all --------------------------------------------------------------------------------------------------


def _make_alltoall(tensor: Any, splits: Any, name: str | None) -> Make:
    def make(member: Member) -> Operation:
        checked = with_rows(tensor, "alltoall")
        parts = checked_splits(splits, int(checked.shape[0]), member.size)
        return AllToAll(checked, name or "", parts, member.size)

    return make


def alltoall_async(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start an all-to-all; its result is always (tensor, received splits). See ``alltoall``."""
    return start(process_set, "alltoall", name, _make_alltoall(tensor, splits, name))


def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send slices of the first dimension to every rank and concatenate what every rank sent here.

    Args:
        tensor: shape (rows, ...).
        splits: rows for each rank, a list or a 1-d array of integers; None for equal parts. Rows beyond their sum stay.
        name: what it is matched by; without one, the k-th unnamed call of each rank belongs together.
        process_set: the ranks that take part.

    Returns:
        The received tensor; with ``splits``, a pair of it and the rows received from each rank (int32).

    Raises:
        ValueError: the splits are not one row count per rank, or add up to more rows than there are.
        DisagreementError: ranks passed different types or trailing dimensions; on every rank.
    """
    output, received = call(process_set, "alltoall", name, _make_alltoall(tensor, splits, name))
    return output if splits is None else (output, np.array(received, np.int32))
