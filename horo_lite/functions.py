"""The collectives on numpy arrays and torch tensors: one core, from which every front end's names are made.

Each call makes an operation and hands it to the named lane of its process set. The asynchronous forms return a
``Handle`` for ``synchronize`` and ``poll``; the others wait, in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import numpy as np

from horo_lite.arrays import plain_values
from horo_lite.context import Member, ProcessSet, current, global_process_set
from horo_lite.engine import Handle, NamedLane
from horo_lite.engine.operations import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Join,
    Operation,
    ReduceScatter,
    Refusal,
    new_tensor,
)
from horo_lite.errors import ArgumentError, ArgumentTypeError
from horo_lite.interfaces import Compressor, Reduction

Average, Sum, Adasum = Reduction.AVERAGE, Reduction.SUM, Reduction.ADASUM
Min, Max, Product = Reduction.MIN, Reduction.MAX, Reduction.PRODUCT


Make = Callable[[Member], Operation]


def call(process_set: ProcessSet, kind: str, name: str | None, make: Make) -> Any:
    """Make an operation, hand it in, wait for it, and return its result.

    Raises:
        ValueError, TypeError: ``make`` raised; the other ranks hear of it and raise too.
        HorovodInternalError: the operation failed, on this rank or on another.
    """
    lane, operation = _made(process_set, kind, name, make)
    return current().engine.call(lane, operation)


def _reduce(
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

    def make(_: Member | None = None) -> Operation:
        given = tensor if in_place else as_tensor(tensor)
        return AllReduce(
            [given], name or "", reduction_of(average, op), float(prescale), float(postscale), in_place=in_place,
            outputs=output,
        )

    output: list[Any] | None = None
    values, lane = plain_values(tensor), process_set.member().lane
    if values is None or lane is None or values.nbytes > lane.short_way.most_bytes:
        return call(process_set, "allreduce", name, make)
    engine = current().engine
    arguments = (type(tensor), values.dtype, values.shape, average, name, op, prescale, postscale)
    target: Any = values
    if not in_place:
        output = [new_tensor(values.shape, tensor)]
        target = plain_values(output[0])
    again = engine.repeat(lane, arguments, name, values, target, make)
    if again is True:
        return tensor if output is None else output[0]
    if again:
        return engine.wait(again)
    lane, operation = _made(process_set, "allreduce", name, make)
    return engine.call(lane, operation, arguments if _PLAIN.issuperset(map(type, arguments[3:])) else None)


_PLAIN = frozenset({type(None), bool, float, str, Reduction})
"""What can't be changed between two calls and still be taken for the same."""


def start(process_set: ProcessSet, kind: str, name: str | None, make: Make) -> Handle:
    """Make an operation and hand it in; it goes on in the background."""
    lane, operation = _made(process_set, kind, name, make)
    lane.submit(operation)
    current().engine.wake()
    return operation.handle


def _made(process_set: ProcessSet, kind: str, name: str | None, make: Make) -> tuple[NamedLane, Operation]:
    context = current()
    member = process_set.member()
    if member.lane is None:
        raise ArgumentError(
            f"rank {context.rank} is not in {process_set}: only its members may call this (check .included())"
        )
    try:
        return member.lane, make(member)
    except (ValueError, TypeError) as error:
        member.lane.submit(Refusal(kind, name or "", str(error)))
        context.engine.wake()
        raise


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous operation and return its result.

    Raises:
        HorovodInternalError: it failed, on this rank or on another.
    """
    return current().engine.wait(handle)


def poll(handle: Handle) -> bool:
    """True when ``synchronize(handle)`` would return at once."""
    return current().engine.poll(handle)


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
    """What all forms of all-reduce share; the result is for ``begin`` or ``start``."""

    def make(member: Member) -> Operation:
        reduction = reduction_of(average, op)
        checked = tensors if in_place else [as_tensor(tensor) for tensor in tensors]
        compressor, states = _compressor(compression, name, len(checked), member)
        return AllReduce(
            checked, name or "", reduction, float(prescale_factor), float(postscale_factor), grouped, in_place,
            compressor, states,
        )

    return make


def _compressor(
    compression: Any, name: str | None, count: int, member: Member
) -> tuple[Compressor | None, list[dict[str, Any]]]:
    """The compressor of a plain call, and what it keeps from call to call under the operation's name."""
    if compression is None:
        return None, []
    from horo_lite.compression import resolve

    compressor = resolve(compression)
    if compressor is None:
        return None, []
    if name is None and getattr(compressor, "keeps_state", False):
        raise ArgumentError(
            f"{compressor!r} keeps what it left unsent from call to call, and finds it again by the name: "
            "pass name=..., or a compressor with feedback=False"
        )
    return compressor, [member.state_of(f"{name}.{index}") if name else {} for index in range(count)]


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
        return _reduce(tensor, average, name, op, prescale_factor, postscale_factor, process_set, False)
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
    return _reduce(tensor, average, name, op, prescale_factor, postscale_factor, process_set, True)


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


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to concatenate every rank's tensor. See ``allgather``."""
    return start(process_set, "allgather", name, lambda _: AllGather([as_tensor(tensor)], name or ""))


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate every rank's tensor along the first dimension, in rank order.

    Args:
        tensor: shape (rows, ...); rows may differ between ranks. A 0-d tensor counts as one row.

    Returns:
        A tensor of shape (sum of all rows, ...).

    Raises:
        DisagreementError: ranks passed different types or trailing dimensions; on every rank.
    """
    return call(
        process_set, "allgather", name, lambda _: AllGather([as_tensor(tensor)], name or "")
    )


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to gather several tensors as one unit. See ``allgather``."""
    return start(
        process_set, "allgather", name,
        lambda _: AllGather([as_tensor(t) for t in tensors], name or "", grouped=True),
    )


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gather several tensors as one unit; returns a list. See ``allgather``."""
    return call(
        process_set, "allgather", name,
        lambda _: AllGather([as_tensor(t) for t in tensors], name or "", grouped=True),
    )


def _make_broadcast(
    tensor: Any, root_rank: int, name: str | None, in_place: bool
) -> Make:
    def make(member: Member) -> Operation:
        if root_rank not in member.ranks:
            raise ArgumentError(
                f"root_rank={root_rank}: expected a global rank of the process set, one of {list(member.ranks)}"
            )
        return Broadcast(tensor if in_place else as_tensor(tensor), name or "", int(root_rank), in_place)

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
        tensor: the same shape and type on every rank; the values of ``root_rank`` (a global rank) are returned.

    Raises:
        ValueError: ``root_rank`` is not in the process set.
        DisagreementError: ranks passed different roots, shapes or types; on every rank.
    """
    return call(
        process_set, "broadcast", name, _make_broadcast(tensor, root_rank, name, False)
    )


def broadcast_async_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to give every rank the root's tensor, in place. See ``broadcast``."""
    return start(process_set, "broadcast", name, _make_broadcast(tensor, root_rank, name, True))


def broadcast_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Give every rank the root's tensor, in place. See ``broadcast``."""
    return call(
        process_set, "broadcast", name, _make_broadcast(tensor, root_rank, name, True)
    )


def _make_alltoall(tensor: Any, splits: Any, name: str | None) -> Make:
    def make(member: Member) -> Operation:
        checked = as_tensor(tensor)
        if not checked.shape:
            raise ArgumentError("alltoall of a 0-d tensor: it needs a first dimension to split")
        return AllToAll(checked, name or "", _checked_splits(checked, splits, member.size), member.size)

    return make


def _checked_splits(tensor: Any, splits: Any, size: int) -> list[int] | None:
    rows = int(tensor.shape[0])
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
        splits: rows for each rank; None for equal parts.

    Returns:
        The received tensor; with ``splits``, a pair of it and the rows received from each rank (int32).
    """
    output, received = call(
        process_set, "alltoall", name, _make_alltoall(tensor, splits, name)
    )
    return output if splits is None else (output, np.array(received, np.int32))


def _make_reducescatter(
    tensors: Sequence[Any], name: str | None, op: Reduction, prescale: float, postscale: float, grouped: bool
) -> Make:
    def make(member: Member) -> Operation:
        reduction = reduction_of(None, op)
        if reduction not in (Average, Sum):
            raise ArgumentError(f"reducescatter has Average and Sum, got {reduction.name.title()}")
        checked = [as_tensor(t) for t in tensors]
        if not all(t.shape for t in checked):
            raise ArgumentError("reducescatter of a 0-d tensor: it needs a first dimension to split")
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
        op: Average or Sum.

    Returns:
        A tensor of shape (rows / N, ...).
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


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set has called it."""
    call(process_set, "barrier", None, lambda _: Barrier(""))


def join(device: int = -1) -> int:
    """This rank is out of data: take part in whatever the others do until all ranks have joined.

    It contributes zeros to Sum and Average (which still divides by all ranks), the identity to Min, Max and
    Product, and no rows to gathers. A broadcast from a joined rank is an error on all ranks.

    Returns:
        The rank that joined last.
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


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Give every rank the root's Python object (pickled by cloudpickle).

    Raises:
        ValueError: ``root_rank`` is not in the process set.
    """
    label = name or "broadcast_object"

    def make(member: Member) -> Operation:
        if root_rank not in member.ranks:
            raise ArgumentError(f"root_rank={root_rank}: expected a global rank of {process_set}")
        # Only the root has rows, so that the length needs no message of its own.
        packed = packed_object((root_rank, obj)) if current().rank == root_rank else np.empty(0, np.uint8)
        return AllGather([packed], label, root_rank=root_rank)

    received = call(process_set, "allgather", label, make)
    return obj if current().rank == root_rank else cloudpickle.loads(received.tobytes())[1]


def packed_object(obj: Any) -> Any:
    """A Python object as an array of bytes.

    Raises:
        TypeError: it can't be pickled.
    """
    try:
        return np.frombuffer(cloudpickle.dumps(obj), np.uint8)
    except Exception as error:
        raise ArgumentTypeError(f"an object of type {type(obj).__name__} can't be sent: {error}") from error


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's Python object, in rank order (pickled by cloudpickle)."""
    label = name or "allgather_object"

    def make(member: Member) -> Operation:
        packed = packed_object(obj)
        return AllGather([np.array([len(packed)], np.int64), packed], label, grouped=True)

    lengths, packed = call(process_set, "allgather", label, make)
    received = packed.tobytes()
    objects, start = [], 0
    for length in lengths:
        objects.append(cloudpickle.loads(received[start : start + int(length)]))
        start += int(length)
    return objects
