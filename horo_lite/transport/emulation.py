"""What MPI does to memory, and how its misuse shows, for networks without MPI: simulator, interleaver, loopback."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from horo_lite.errors import HorovodInternalError
from horo_lite.interfaces import Array, Native, Reduction

_NATIVE_UFUNC = {
    Reduction.SUM: np.add,
    Reduction.MIN: np.minimum,
    Reduction.MAX: np.maximum,
    Reduction.PRODUCT: np.multiply,
}


class DeadlockError(HorovodInternalError):
    """No rank can go on: the message says which ranks wait for what."""


class MessageMismatchError(HorovodInternalError):
    """A message was received by nobody, or met a receive of another length."""


def copy_bytes(target: Array, source: Array) -> None:
    """What a message does: bytes, whatever they mean to either side."""
    if target.dtype == source.dtype:
        target[:] = source
    else:
        target.view(np.uint8)[:] = source.view(np.uint8)


def snapshot(buffer: Array) -> Array:
    """A copy, as an eager message takes it."""
    return buffer.copy() if isinstance(buffer, np.ndarray) else buffer.clone()


def carry_out_native(members: Sequence[tuple[int, Native]]) -> None:
    """What the MPI library does with one Native instruction of every rank."""
    natives = [native for _, native in sorted(members, key=lambda member: member[0])]
    first = natives[0]
    if first.operation == "broadcast":
        for native in natives:
            if native is not natives[first.root]:
                native.buffer[:] = natives[first.root].buffer
        return
    combined = _NATIVE_UFUNC[first.reduction].reduce(
        [np.asarray(native.buffer) for native in natives]
    )
    for native in natives:
        native.buffer[:] = combined.astype(native.buffer.dtype)
