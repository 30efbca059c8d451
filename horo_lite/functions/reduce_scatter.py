"""Reduce-scatter: one tensor or several, waited for or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horo_lite.engine import Handle
from horo_lite.engine.operations import Operation, ReduceScatter
from horo_lite.errors import ArgumentError
from horo_lite.functions.arguments import Average, Sum, reduction_of, with_rows
from horo_lite.functions.submission import Make, call, start
from horo_lite.interfaces import Reduction
from horo_lite.process_sets import Member, ProcessSet, global_process_set


def _make_reducescatter(
    tensors: Sequence[Any], name: str | None, op: Reduction, prescale: float, postscale: float, grouped: bool
) -> Make:
    def make(_: Member) -> Operation:
        reduction = reduction_of(None, op)
        if reduction not in (Average, Sum):
            raise ArgumentError(f"reducescatter has Average and Sum, got {reduction.name.title()}")
        checked = [with_rows(tensor, "reducescatter") for tensor in tensors]
        return ReduceScatter(checked, name or "", reduction, float(prescale), float(postscale), grouped)

    return make


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: Reduction = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a reduce-scatter. See ``reducescatter``."""
    make = _make_reducescatter([tensor], name, op, prescale_factor, postscale_factor, False)
    return start(process_set, "reducescatter", name, make)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    op: Reduction = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce, and leave each rank its part of the first dimension (the first ranks get a row more if uneven).

    Args:
        tensor: shape (rows, ...), the same on every rank.
        name: what it is matched by; without one, the k-th unnamed call of each rank belongs together.
        op: Average or Sum.
        process_set: the ranks that take part.
        prescale_factor: every input is multiplied by it.
        postscale_factor: the result is multiplied by it.

    Returns:
        A tensor of shape (rows / N, ...).

    Raises:
        DisagreementError: ranks passed different shapes, types or arguments; on every rank.
        ValueError, TypeError: another ``op``, a 0-d tensor, or a type that has no such reduction.
    """
    make = _make_reducescatter([tensor], name, op, prescale_factor, postscale_factor, False)
    return call(process_set, "reducescatter", name, make)


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: Reduction = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a reduce-scatter of several tensors as one unit. See ``reducescatter``."""
    make = _make_reducescatter(tensors, name, op, prescale_factor, postscale_factor, True)
    return start(process_set, "reducescatter", name, make)


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: Reduction = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce-scatter several tensors as one unit; returns a list. See ``reducescatter``."""
    make = _make_reducescatter(tensors, name, op, prescale_factor, postscale_factor, True)
    return call(process_set, "reducescatter", name, make)
