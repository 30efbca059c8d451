"""Local momentum: for methods that send a momentum in place of the gradient, in ``state["velocity"]``.

The optimizer behind such a method has no momentum of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from horo_lite.compression.backend import quiet
from horo_lite.compression.base import Bucket, State, remembered
from horo_lite.interfaces import Array


@quiet
def velocity(bucket: Bucket, states: Sequence[State], momentum: float, gain: float) -> Array:
    """momentum * velocity + gain * gradient, as a new flat array of the bucket's work type."""
    backend = bucket.backend
    out = bucket.flat * gain
    for piece, state in zip(bucket.layout.split(out), states, strict=True):
        old = remembered(state, "velocity", len(piece), backend, bucket.work_type)
        if old is not None:
            piece += momentum * old
    return out


def keep_velocity(flat: Array, bucket: Bucket, states: Sequence[State]) -> None:
    """Write every gradient's part of ``flat`` into its state, as memory of its own."""
    for piece, state in zip(bucket.layout.split(flat), states, strict=True):
        state["velocity"] = bucket.backend.copy(piece)
