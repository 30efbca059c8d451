"""What callers pass, checked: reductions, tensors, roots, and the splits of an all-to-all."""

from __future__ import annotations

from typing import Any

import numpy as np

from horo_lite.errors import ArgumentError
from horo_lite.interfaces import Reduction
from horo_lite.process_sets import Member

Average, Sum, Adasum = Reduction.AVERAGE, Reduction.SUM, Reduction.ADASUM
Min, Max, Product = Reduction.MIN, Reduction.MAX, Reduction.PRODUCT


def reduction_of(average: bool | None, op: Reduction | int | None) -> Reduction:
    """Horovod's two ways to say what is done: ``op``, or the deprecated ``average``."""
    if average is not None and op is not None:
        raise ArgumentError("pass either op or average (deprecated), not both")
    if type(op) is Reduction:
        return op
    if op is None:
        return Average if average is None or average else Sum
    try:
        return Reduction(op)
    except ValueError:
        raise ArgumentError(f"op={op!r}: expected one of Average, Sum, Adasum, Min, Max, Product") from None


def as_tensor(value: Any) -> Any:
    """Arrays and tensors as they are; numbers and lists as numpy arrays."""
    return value if hasattr(value, "dtype") and hasattr(value, "shape") else np.asarray(value)


def with_rows(tensor: Any, kind: str) -> Any:
    """``as_tensor``, which must have a first dimension that ``kind`` can split."""
    checked = as_tensor(tensor)
    if not checked.shape:
        raise ArgumentError(f"{kind} of a 0-d tensor: it needs a first dimension to split")
    return checked


def checked_root(root_rank: int, member: Member) -> int:
    """A global rank that must be one of the process set."""
    if root_rank not in member.ranks:
        raise ArgumentError(
            f"root_rank={root_rank}: expected a global rank of the process set, one of {list(member.ranks)}"
        )
    return int(root_rank)


def checked_splits(splits: Any, rows: int, size: int) -> list[int] | None:
    """The rows that go to each of ``size`` ranks, out of ``rows``; None for equal parts."""
    if splits is None:
        if rows % size:
            raise ArgumentError(
                f"alltoall without splits: the first dimension ({rows}) must be divisible by the {size} ranks"
            )
        return None
    checked = np.asarray(splits)
    if checked.ndim != 1 or checked.dtype.kind not in "iu":
        raise ArgumentError(f"alltoall splits: expected a 1-d list of integers, got {splits!r}")
    parts = [int(n) for n in checked]
    if len(parts) != size or min(parts) < 0 or sum(parts) > rows:
        raise ArgumentError(
            f"alltoall splits {parts}: expected {size} row counts (one per rank), none negative, "
            f"that add up to at most the first dimension ({rows})"
        )
    return parts
