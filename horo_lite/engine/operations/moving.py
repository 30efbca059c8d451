"""Operations that move values and compute nothing: all-gather, broadcast, all-to-all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from horo_lite.arrays import Flat
from horo_lite.engine.agreement import Signature
from horo_lite.engine.fabric import Fabric
from horo_lite.engine.operations.base import Operation, Signatures, described, new_tensor
from horo_lite.interfaces import Schedule


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
        super().__init__(name, Signature(self.kind, *described(tensors), root=root_rank))

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
        super().__init__(name, Signature(self.kind, *described([tensor]), root=root_rank))

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
    chooses = False

    def __init__(self, tensor: Any, name: str, splits: Sequence[int] | None, size: int) -> None:
        self._tensor = tensor
        self._source = Flat(tensor)
        self._output: Any = None
        self._received: list[int] = []
        rows = tensor.shape[0]
        self._splits = tuple(splits) if splits is not None else (rows // size,) * size
        super().__init__(name, Signature(self.kind, *described([tensor]), splits=self._splits))

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
