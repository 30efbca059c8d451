"""Every operation of the named lane: what a rank asks for, the schedule that does it, what comes back.

One class per kind. An operation is made by the caller, which raises where this rank can't take part (later the others
would wait for it), agreed on through its ``Signature``, then asked for its
schedule with all ranks' signatures at hand (a gathered array's rows are known only then), and at last for its
result. For a rank that has called ``join()``, ``stand_in`` makes the operation that contributes nothing.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar

import numpy as np

from horo_lite.arrays import (
    Flat,
    check_supported,
    device_name,
    is_torch,
    kernel,
    numpy_dtype,
    type_name,
)
from horo_lite.engine.agreement import Shape, Signature
from horo_lite.engine.compressed import compressed
from horo_lite.engine.coordinator import JOIN, Key
from horo_lite.engine.fabric import Fabric
from horo_lite.engine.handles import Handle
from horo_lite.interfaces import Array, Compressor, Parameter, Reduction, Schedule

Signatures = dict[int, Signature]  # by member; joined members are missing
_check_supported = functools.lru_cache(maxsize=None)(check_supported)
_FUSED_BYTES = 1 << 16  # tensors of a group up to this size are packed into one message


def new_tensor(shape: Shape, like: Any) -> Any:
    """An uninitialised tensor of the framework, type and device of ``like``."""
    if is_torch(like):
        return like.new_empty(shape, requires_grad=False)
    return np.empty(shape, like.dtype)


class Operation:
    """One operation on this rank, from submission to result.

    Args:
        name: what it is matched by; "" for an unnamed one, which is numbered by its lane.
        signature: what the ranks compare.
    """

    kind: ClassVar[str]

    def __init__(self, name: str, signature: Signature) -> None:
        self.key = Key(name)
        self.signature = signature
        self.handle = Handle(name)

    def schedule(self, signatures: Signatures, fabric: Fabric) -> tuple[Schedule, bool]:
        """What this rank does, and whether it needs the fabric's staging memory to itself."""
        raise NotImplementedError

    def payload(self, fabric: Fabric) -> bytes | None:
        """This rank's values, where they are few enough to travel with the request; the same length on all ranks."""
        return None

    def combine(self, payloads: Sequence[bytes], fabric: Fabric) -> bytes:
        """On the coordinator: the result of all members' payloads, in order."""
        raise NotImplementedError

    def absorb(self, result: bytes, fabric: Fabric) -> None:
        """The result that came with the answer, in place of a schedule."""
        raise NotImplementedError

    def result(self) -> Any:
        """Called once the schedule has ended."""
        return None


class AllReduce(Operation):
    """Reduce one tensor, or several as one unit.

    Args:
        tensors: numpy arrays or torch tensors, of any types and shapes.
        grouped: the result is a list.
        in_place: the tensors themselves receive the result.
        compressor: what goes on the wire, with one state mapping per tensor; None for the values themselves.
    """

    kind = "allreduce"

    def __init__(
        self,
        tensors: Sequence[Any],
        name: str,
        reduction: Reduction,
        prescale: float = 1.0,
        postscale: float = 1.0,
        grouped: bool = False,
        in_place: bool = False,
        compressor: Compressor | None = None,
        states: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._tensors = tensors
        self._grouped = grouped
        self._in_place = in_place
        self._compressor = compressor
        self._states = states
        self._outputs: Sequence[Any] = tensors
        self._flats: list[Flat] = []
        types = tuple([type_name(tensor) for tensor in tensors])
        for type_ in types:
            _check_supported(type_, reduction, prescale, postscale)
        self._sources = [Flat(tensor, in_place) for tensor in tensors]
        shapes = tuple([tuple(tensor.shape) for tensor in tensors])
        device = device_name(tensors[0]) if tensors else "cpu"
        super().__init__(
            name,
            Signature(self.kind, types, shapes, device, reduction, -1, prescale, postscale, compressor),
        )

    def payload(self, fabric: Fabric) -> bytes | None:
        s = self.signature
        if len(self._sources) != 1 or self._sources[0].buffer.nbytes > fabric.travelling_bytes:
            return None
        if s.compression is not None or s.prescale != 1.0 or s.device != "cpu" or s.reduction == Reduction.ADASUM:
            return None
        payload: bytes = self._sources[0].buffer.tobytes()
        return payload

    def combine(self, payloads: Sequence[bytes], fabric: Fabric) -> bytes:
        s = self.signature
        arithmetic = kernel(s.types[0], Reduction(s.reduction), fabric.size, 1.0, s.postscale)
        dtype = self._sources[0].buffer.dtype
        inputs = [np.frombuffer(payload, dtype) for payload in payloads]
        out = np.empty(len(inputs[0]), dtype)
        arithmetic.combine(out, inputs, last=True)
        return out.tobytes()

    def absorb(self, result: bytes, fabric: Fabric) -> None:
        self._take_outputs(fabric)
        self._flats[0].buffer[:] = np.frombuffer(result, self._flats[0].buffer.dtype)

    def _take_outputs(self, fabric: Fabric) -> None:
        if self._in_place:
            self._flats = self._sources
        else:
            self._outputs = [new_tensor(tuple(t.shape), t) for t in self._tensors]
            self._flats = [Flat(output) for output in self._outputs]
        dense_bytes = sum([flat.buffer.nbytes for flat in self._flats])
        fabric.stats.dense_bytes += dense_bytes
        if self._compressor is None:
            fabric.stats.payload_bytes += dense_bytes

    def schedule(self, signatures: Signatures, fabric: Fabric) -> tuple[Schedule, bool]:
        self._take_outputs(fabric)
        if not self._in_place:
            for flat, source in zip(self._flats, self._sources, strict=True):
                flat.buffer[:] = source.buffer
        if self._compressor is not None:
            buffers = [flat.buffer for flat in self._flats]
            return self._compressed(self._compressor, buffers, fabric), False
        if len(self._flats) == 1:
            return self._reduce(self._flats[0].buffer, self.signature.types[0], fabric)
        return self._reduce_group(fabric), True

    def result(self) -> Any:
        for flat in self._flats:
            flat.write_back()
        return list(self._outputs) if self._grouped else self._outputs[0]

    def _reduce(self, buffer: Array, type_name: str, fabric: Fabric) -> tuple[Schedule, bool]:
        s = self.signature
        return fabric.allreduce(buffer, type_name, s.reduction, s.prescale, s.postscale, s.device)

    def _reduce_group(self, fabric: Fabric) -> Schedule:
        """Small tensors of one type travel in one message, the others one after the other."""
        packs: dict[str, list[Array]] = {}
        adasum = self.signature.reduction == Reduction.ADASUM
        for flat, name in zip(self._flats, self.signature.types, strict=True):
            if flat.buffer.nbytes <= _FUSED_BYTES and not adasum:
                packs.setdefault(name, []).append(flat.buffer)
            else:
                yield from self._reduce(flat.buffer, name, fabric)[0]
        for name, buffers in packs.items():
            whole = pack(buffers)
            yield from self._reduce(whole, name, fabric)[0]
            unpack(whole, buffers)

    def _compressed(self, compressor: Compressor, buffers: list[Array], fabric: Fabric) -> Schedule:
        s = self.signature
        if s.prescale != 1.0:
            for buffer in buffers:
                buffer *= s.prescale
        factor = s.postscale * (fabric.size if s.reduction == Reduction.SUM else 1)
        of_type: dict[str, list[int]] = {}
        for index, kind in enumerate(s.types):
            of_type.setdefault(kind, []).append(index)
        for members in of_type.values():  # a compressor takes gradients of one type
            bound = compressor.bind([Parameter(f"{self.key.name}.{i}", s.shapes[i]) for i in members])
            some, states = [buffers[i] for i in members], [self._states[i] for i in members]
            reduced = yield from compressed(bound, some, states, fabric)
            for buffer, mean in zip(some, reduced.mean, strict=True):
                buffer[:] = mean
                if factor != 1:
                    buffer *= factor


def pack(buffers: Sequence[Array]) -> Array:
    """One flat array of all of them, one after the other."""
    if is_torch(buffers[0]):
        whole = buffers[0].new_empty(sum(len(buffer) for buffer in buffers))
    else:
        whole = np.empty(sum(len(buffer) for buffer in buffers), buffers[0].dtype)
    start = 0
    for buffer in buffers:
        whole[start : start + len(buffer)] = buffer
        start += len(buffer)
    return whole


def unpack(whole: Array, buffers: Sequence[Array]) -> None:
    """Write the parts of ``pack`` back to where they came from."""
    start = 0
    for buffer in buffers:
        buffer[:] = whole[start : start + len(buffer)]
        start += len(buffer)


class AllGather(Operation):
    """Concatenate every rank's tensor along its first dimension, which may differ; 0-d tensors count as one row.

    Args:
        root_rank: the only rank that has rows, for an object sent to all; compared, so that ranks agree on it.
    """

    kind = "allgather"

    def __init__(self, tensors: Sequence[Any], name: str, grouped: bool = False, root_rank: int = -1) -> None:
        self._tensors = tensors
        self._sources = [Flat(tensor) for tensor in tensors]
        self._grouped = grouped
        self._outputs: list[Any] = []
        super().__init__(
            name,
            Signature(
                self.kind, tuple([type_name(t) for t in tensors]), tuple([tuple(t.shape) for t in tensors]),
                device_name(tensors[0]) if tensors else "cpu", root=root_rank,
            ),
        )

    def schedule(self, signatures: Signatures, fabric: Fabric) -> tuple[Schedule, bool]:
        return self._gather(signatures, fabric), False

    def _gather(self, signatures: Signatures, fabric: Fabric) -> Schedule:
        for index, (tensor, source) in enumerate(zip(self._tensors, self._sources, strict=True)):
            shape = tuple(tensor.shape)
            row = math.prod(shape[1:])
            rows = [_rows(signatures.get(member), index) for member in range(fabric.size)]
            output = new_tensor((sum(rows), *shape[1:]), tensor)
            self._outputs.append(output)
            yield from fabric.allgather(source.buffer, Flat(output).buffer, [n * row for n in rows])

    def result(self) -> Any:
        return self._outputs if self._grouped else self._outputs[0]


def _rows(signature: Signature | None, index: int) -> int:
    """The rows a member contributes to a gathered tensor; none when it has joined."""
    if signature is None:
        return 0
    shape = signature.shapes[index]
    return shape[0] if shape else 1


class Broadcast(Operation):
    """Give every rank the root's tensor.

    Args:
        root_rank: the global rank that sends.
    """

    kind = "broadcast"

    def __init__(self, tensor: Any, name: str, root_rank: int, in_place: bool = False) -> None:
        self._tensor = tensor
        self._in_place = in_place
        self._output = tensor
        self._source = self._flat = Flat(tensor, in_place)
        super().__init__(
            name,
            Signature(
                self.kind, (type_name(tensor),), (tuple(tensor.shape),), device_name(tensor), root=root_rank
            ),
        )

    def schedule(self, signatures: Signatures, fabric: Fabric) -> tuple[Schedule, bool]:
        root = fabric.ranks.index(self.signature.root)
        if not self._in_place:
            self._output = new_tensor(tuple(self._tensor.shape), self._tensor)
            self._flat = Flat(self._output, writable=True)
            if root == fabric.group.index:
                self._flat.buffer[:] = self._source.buffer
        return fabric.broadcast(self._flat.buffer, root), False

    def result(self) -> Any:
        self._flat.write_back()
        return self._output


class AllToAll(Operation):
    """Send slices of the first dimension to every rank, receive one from every rank.

    Args:
        splits: the rows for each rank; None for equal parts.

    Result: the tensor, and the rows received from each rank (a list).
    """

    kind = "alltoall"

    def __init__(self, tensor: Any, name: str, splits: Sequence[int] | None, size: int) -> None:
        self._tensor = tensor
        self._source = Flat(tensor)
        self._output: Any = None
        self._received: list[int] = []
        rows = tensor.shape[0]
        self._splits = tuple(splits) if splits is not None else (rows // size,) * size
        super().__init__(
            name,
            Signature(
                self.kind, (type_name(tensor),), (tuple(tensor.shape),), device_name(tensor), splits=self._splits
            ),
        )

    def schedule(self, signatures: Signatures, fabric: Fabric) -> tuple[Schedule, bool]:
        shape = tuple(self._tensor.shape)
        row = math.prod(shape[1:])
        sent = [0] * fabric.size if fabric.group.index not in signatures else list(self._splits)
        splits = [signatures[member].splits if member in signatures else None for member in range(fabric.size)]
        self._received = [0 if parts is None else parts[fabric.group.index] for parts in splits]
        self._output = new_tensor((sum(self._received), *shape[1:]), self._tensor)
        return (
            fabric.alltoall(
                self._source.buffer, [n * row for n in sent],
                Flat(self._output).buffer, [n * row for n in self._received],
            ),
            False,
        )

    def result(self) -> Any:
        return self._output, self._received


class ReduceScatter(Operation):
    """Reduce, and leave each rank its part of the first dimension; the first ranks get a row more where it is uneven.

    Only Sum and Average. A joined rank gets no rows.
    """

    kind = "reducescatter"

    def __init__(
        self,
        tensors: Sequence[Any],
        name: str,
        reduction: Reduction,
        prescale: float = 1.0,
        postscale: float = 1.0,
        grouped: bool = False,
    ) -> None:
        self._tensors = tensors
        self._sources = [Flat(tensor) for tensor in tensors]
        self._grouped = grouped
        self._outputs: list[Any] = []
        super().__init__(
            name,
            Signature(
                self.kind, tuple([type_name(t) for t in tensors]), tuple([tuple(t.shape) for t in tensors]),
                device_name(tensors[0]) if tensors else "cpu", int(reduction), -1, prescale, postscale,
            ),
        )

    def schedule(self, signatures: Signatures, fabric: Fabric) -> tuple[Schedule, bool]:
        return self._scatter(signatures, fabric), False

    def _scatter(self, signatures: Signatures, fabric: Fabric) -> Schedule:
        s = self.signature
        for tensor, source, name in zip(self._tensors, self._sources, s.types, strict=True):
            shape = tuple(tensor.shape)
            row = math.prod(shape[1:])
            rows = split_rows(shape[0], list(signatures), fabric.size)
            work = Flat(new_tensor(shape, tensor)).buffer
            work[:] = source.buffer
            counts = [n * row for n in rows]
            yield from fabric.reduce_scatter(
                work, counts, name, s.reduction, s.prescale, s.postscale, s.device
            )
            mine = fabric.group.index
            output = new_tensor((rows[mine], *shape[1:]), tensor)
            start = sum(counts[:mine])
            Flat(output).buffer[:] = work[start : start + counts[mine]]
            self._outputs.append(output)

    def result(self) -> Any:
        return self._outputs if self._grouped else self._outputs[0]


def split_rows(rows: int, members: Sequence[int], size: int) -> list[int]:
    """Rows for each member: as even as they go, the first get one more; members not listed get none."""
    counts = [0] * size
    for place, member in enumerate(members):
        counts[member] = rows // len(members) + (place < rows % len(members))
    return counts


class Barrier(Operation):
    """Go on when every rank has arrived."""

    kind = "barrier"

    def __init__(self, name: str) -> None:
        super().__init__(name, Signature(self.kind))

    def schedule(self, signatures: Signatures, fabric: Fabric) -> tuple[Schedule, bool]:
        return _nothing(), False  # the agreement was the barrier


def _nothing() -> Generator[Any, Any, None]:
    return
    yield


class Join(Operation):
    """This rank is out of data and takes part in everything until all ranks have joined. Result: the last to join.

    Args:
        planned: the operations of the planned lane before it, since their messages can overtake this one.
    """

    kind = "join"

    def __init__(self, planned: int = 0) -> None:
        super().__init__(JOIN.name, Signature(self.kind, root=planned))


class Refusal(Operation):
    """Tells the other ranks why this one cannot take part, so that they raise instead of waiting."""

    def __init__(self, kind: str, name: str, fault: str) -> None:
        super().__init__(name, Signature(kind, fault=fault))


def stand_in(signatures: Signatures) -> Operation:
    """The operation of a joined rank: zeros for sums, the identity for others, no rows."""
    signature = next(iter(signatures.values()))
    return _STAND_INS[signature.kind](signature)


def _blank(signature: Signature, index: int, rows: int | None = None) -> Any:
    """A tensor for a joined rank that leaves the result as it is."""
    shape = signature.shapes[index]
    if rows is not None:
        shape = (rows, *shape[1:])
    name = signature.types[index]
    value = _identity(name, Reduction(signature.reduction))
    if signature.device != "cpu":
        torch = sys.modules["torch"]  # a device was named, so the script uses torch
        kind = signature.device.partition(":")[0].removeprefix("torch-")
        return torch.full(shape, value, dtype=getattr(torch, name), device=kind)
    return np.full(shape, value, numpy_dtype(name))


def _identity(name: str, reduction: Reduction) -> Any:
    if reduction is Reduction.PRODUCT:
        return 1
    if reduction not in (Reduction.MIN, Reduction.MAX):
        return 0
    least = reduction is Reduction.MIN
    if name == "bool":
        return least
    dtype = numpy_dtype(name)
    if dtype.kind in "iu":
        return np.iinfo(dtype).max if least else np.iinfo(dtype).min
    return math.inf if least else -math.inf


def _absent_allreduce(s: Signature) -> Operation:
    tensors = [_blank(s, i) for i in range(len(s.shapes))]
    return AllReduce(
        tensors, "", Reduction(s.reduction), s.prescale, s.postscale, grouped=True, in_place=True,
        compressor=s.compression, states=[{} for _ in tensors],
    )


def _absent_reducescatter(s: Signature) -> Operation:
    tensors = [_blank(s, i) for i in range(len(s.shapes))]
    return ReduceScatter(tensors, "", Reduction(s.reduction), s.prescale, s.postscale, grouped=True)


_STAND_INS: dict[str, Callable[[Signature], Operation]] = {
    "allreduce": _absent_allreduce,
    "allgather": lambda s: AllGather([_blank(s, i, 0) for i in range(len(s.shapes))], "", grouped=True),
    "alltoall": lambda s: AllToAll(_blank(s, 0, 0), "", None, 1),
    "reducescatter": _absent_reducescatter,
    "broadcast": lambda s: Broadcast(_blank(s, 0), "", s.root, in_place=True),
    "barrier": lambda s: Barrier(""),
}
