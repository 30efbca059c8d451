"""What a rank that has called ``join()`` contributes to others' operations: nothing that changes the result."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from horo_lite.arrays import numpy_dtype
from horo_lite.engine.agreement import Signature
from horo_lite.engine.operations.allreduce import AllReduce
from horo_lite.engine.operations.base import Barrier, Operation, Signatures
from horo_lite.engine.operations.moving import AllGather, AllToAll, Broadcast
from horo_lite.engine.operations.reducescatter import ReduceScatter
from horo_lite.interfaces import Reduction


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
        compressor=None if s.compression is None else s.compression.compressor, states=[{} for _ in tensors],
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
