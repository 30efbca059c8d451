"""All-reduce: one tensor or several, in place or not, waited for or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horo_lite.arrays import plain_values
from horo_lite.compression import resolve
from horo_lite.context import current
from horo_lite.engine import Handle
from horo_lite.engine.operations import AllReduce, Operation, new_tensor
from horo_lite.errors import ArgumentError
from horo_lite.functions.arguments import as_tensor, reduction_of
from horo_lite.functions.submission import Make, call, made, member_of, start
from horo_lite.interfaces import Compressor, Reduction
from horo_lite.process_sets import Member, ProcessSet, global_process_set

_UNCHANGING = frozenset({type(None), bool, float, str, Reduction})
"""Types of arguments that nobody can change between two calls while they are taken for the same."""


def make_allreduce(
    tensors: Sequence[Any],
    average: bool | None,
    name: str | None,
    op: Reduction | int | None,
    prescale_factor: float,
    postscale_factor: float,
    compression: Any = None,
    grouped: bool = False,
    in_place: bool = False,
) -> Make:
    """What all forms of all-reduce share; the result is for ``call`` or ``start``."""

    def make(member: Member) -> Operation:
        reduction = reduction_of(average, op)
        checked = list(tensors) if in_place else [as_tensor(tensor) for tensor in tensors]
        compressor, states = _compressor(compression, name, len(checked), member)
        return AllReduce(
            checked, name or "", reduction, float(prescale_factor), float(postscale_factor), grouped, in_place,
            compressor, states,
        )

    return make


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to reduce a tensor over all ranks; the input is left as it is. See ``allreduce``."""
    return start(
        process_set, "allreduce", name,
        make_allreduce([tensor], average, name, op, prescale_factor, postscale_factor),
    )


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a tensor over all ranks.

    Args:
        tensor: any shape and layout, the same shape and type on every rank. Numbers and lists become arrays.
        average: deprecated: True for Average, False for Sum.
        name: what it is matched by; without one, the k-th unnamed call of each rank belongs together.
        compression: what goes on the wire (``hvd.Compression``).
        op: Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: every input is multiplied by it.
        postscale_factor: the result is multiplied by it.
        process_set: the ranks that take part.

    Returns:
        A new tensor of the same shape and type. 16-bit floats are added in float32 and rounded once; an integer
        Average is truncated toward zero; an integer Sum wraps as its type does.

    Raises:
        DisagreementError: ranks passed different shapes, types or arguments; on every rank.
        ValueError, TypeError: this rank's arguments are wrong, or the type has no such reduction.
    """
    if compression is None:
        return _reduce_one(tensor, average, name, op, prescale_factor, postscale_factor, process_set, False)
    make = make_allreduce([tensor], average, name, op, prescale_factor, postscale_factor, compression)
    return call(process_set, "allreduce", name, make)


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to reduce a tensor in place. See ``allreduce``."""
    return start(
        process_set, "allreduce", name,
        make_allreduce([tensor], average, name, op, prescale_factor, postscale_factor, in_place=True),
    )


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a tensor in place and return it. See ``allreduce``."""
    return _reduce_one(tensor, average, name, op, prescale_factor, postscale_factor, process_set, True)


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to reduce several tensors as one unit. See ``allreduce``."""
    return start(
        process_set, "allreduce", name,
        make_allreduce(tensors, average, name, op, prescale_factor, postscale_factor, grouped=True),
    )


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduce several tensors, of any types and shapes, as one unit; returns a list. See ``allreduce``."""
    make = make_allreduce(
        tensors, average, name, op, prescale_factor, postscale_factor, compression, grouped=True
    )
    return call(process_set, "allreduce", name, make)


def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to reduce several tensors in place as one unit. See ``allreduce``."""
    return start(
        process_set, "allreduce", name,
        make_allreduce(
            tensors, average, name, op, prescale_factor, postscale_factor, grouped=True, in_place=True
        ),
    )


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduce several tensors in place as one unit, and return them. See ``allreduce``."""
    make = make_allreduce(
        tensors, average, name, op, prescale_factor, postscale_factor, grouped=True, in_place=True
    )
    return call(process_set, "allreduce", name, make)


def _compressor(
    compression: Any, name: str | None, count: int, member: Member
) -> tuple[Compressor | None, list[dict[str, Any]]]:
    """The compressor of a plain call, and what it keeps from call to call under the operation's name."""
    compressor = None if compression is None else resolve(compression)
    if compressor is None:
        return None, []
    if name is None and getattr(compressor, "keeps_state", False):
        raise ArgumentError(
            f"{compressor!r} keeps what it left unsent from call to call, and finds it again by the name: "
            "pass name=..., or a compressor with feedback=False"
        )
    return compressor, [member.state_of(f"{name}.{index}") if name else {} for index in range(count)]


def _reduce_one(
    tensor: Any,
    average: bool | None,
    name: str | None,
    op: Reduction | int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    in_place: bool,
) -> Any:
    """``call`` for one uncompressed tensor; where the same has gone before, a small one goes by what is kept of it."""
    values, lane = plain_values(tensor), member_of(process_set).lane
    if values is None or lane is None or values.nbytes > lane.short_way.most_bytes:
        make_any = make_allreduce([tensor], average, name, op, prescale, postscale, in_place=in_place)
        return call(process_set, "allreduce", name, make_any)
    outputs = None if in_place else [new_tensor(values.shape, tensor)]
    result = tensor if outputs is None else outputs[0]

    def make(_: Member | None = None) -> Operation:
        return AllReduce(
            [tensor], name or "", reduction_of(average, op), float(prescale), float(postscale), in_place=in_place,
            outputs=outputs,
        )

    engine = current().engine
    arguments = (type(tensor), values.dtype, values.shape, average, name, op, prescale, postscale)
    again = engine.repeat(lane, arguments, name, values, values if in_place else plain_values(result), make)
    if again is True:
        return result
    if again:
        return engine.wait(again)
    lane, operation = made(process_set, "allreduce", name, make)
    return engine.call(lane, operation, arguments if _UNCHANGING.issuperset(map(type, arguments[3:])) else None)
