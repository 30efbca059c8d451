"""All-reduce of one tensor or of a group, plain or compressed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from horo_lite.arrays import Flat, check_supported, is_torch
from horo_lite.arrays.types import FLOATS
from horo_lite.compression import Cast
from horo_lite.engine.agreement import Described, Signature
from horo_lite.engine.compressed import cast_reduced, check_reduces, compressed
from horo_lite.engine.fabric import Fabric
from horo_lite.engine.operations.base import Operation, Signatures, described, new_tensor
from horo_lite.interfaces import Array, Compressor, Parameter, Reduction, Schedule

_check_supported = functools.lru_cache(maxsize=None)(check_supported)
_FUSED_BYTES = 1 << 16  # tensors of a group up to this size are packed into one message


class AllReduce(Operation):
    """Reduce one tensor, or several as one unit.

    Args:
        tensors: numpy arrays or torch tensors, of any types and shapes.
        grouped: the result is a list.
        in_place: the tensors themselves receive the result.
        outputs: else these do, writable and row-major; None for new ones.
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
        outputs: Sequence[Any] | None = None,
    ) -> None:
        self._tensors = tensors
        self._grouped = grouped
        self._in_place = in_place
        self._compressor = compressor
        self._states = states
        self._outputs: Sequence[Any] | None = tensors if in_place else outputs
        self._flats: list[Flat] = []
        types, shapes, device = described(tensors)
        for type_ in types:
            _check_supported(type_, reduction, prescale, postscale)
        check_reduces(compressor, reduction)
        self._sources = [Flat(tensor, in_place) for tensor in tensors]
        offered = None if compressor is None else Described(compressor)
        super().__init__(
            name, Signature(self.kind, types, shapes, device, reduction, -1, prescale, postscale, offered)
        )

    def values(self) -> Array | None:
        s = self.signature
        if len(self._sources) != 1:
            return None
        if s.compression is not None or s.prescale != 1.0 or s.device != "cpu" or s.reduction == Reduction.ADASUM:
            return None
        return self._sources[0].buffer

    def target(self, fabric: Fabric) -> Array:
        self._take_outputs(fabric)
        return self._flats[0].buffer

    def _take_outputs(self, fabric: Fabric) -> None:
        if self._in_place:
            self._flats = self._sources
        else:
            if self._outputs is None:
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
        outputs = self._outputs or ()
        return list(outputs) if self._grouped else outputs[0]

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
        reduction = Reduction(s.reduction)
        cast = compressor if isinstance(compressor, Cast) and reduction is not Reduction.AVERAGE else None
        of_type: dict[str, list[int]] = {}
        for index, (kind, buffer) in enumerate(zip(s.types, buffers, strict=True)):
            if kind not in FLOATS or (cast is not None and not cast.shortens(kind)):
                fabric.stats.payload_bytes += buffer.nbytes
                yield from self._reduce(buffer, kind, fabric)[0]
                continue
            if s.prescale != 1.0:
                buffer *= s.prescale
            of_type.setdefault(kind, []).append(index)
        factor = s.postscale * (fabric.size if reduction is Reduction.SUM else 1)
        for members in of_type.values():  # a compressor takes gradients of one type
            some, states = [buffers[i] for i in members], [self._states[i] for i in members]
            if cast is not None:
                whole = pack(some)
                starts = [0, *itertools.accumulate(map(len, some))] if reduction is Reduction.ADASUM else None
                yield from cast_reduced(whole, cast, fabric, reduction, s.postscale, starts)
                unpack(whole, some)
                continue
            bound = compressor.bind([Parameter(f"{self.key.name}.{i}", s.shapes[i]) for i in members])
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
