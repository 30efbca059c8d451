"""Reduce-scatter of one tensor or of a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from horo_lite.arrays import Flat, check_supported
from horo_lite.engine.agreement import Signature
from horo_lite.engine.fabric import Fabric
from horo_lite.engine.operations.base import Operation, Signatures, described, new_tensor
from horo_lite.interfaces import Reduction, Schedule


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
        self._grouped = grouped
        self._outputs: list[Any] = []
        types, shapes, device = described(tensors)
        for type_ in types:
            check_supported(type_, reduction, prescale, postscale)
        self._sources = [Flat(tensor) for tensor in tensors]
        super().__init__(name, Signature(self.kind, types, shapes, device, int(reduction), -1, prescale, postscale))

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
