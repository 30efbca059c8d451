"""One bit per element: 1/32 of float32, and a scale per gradient.

Sources: EF-signSGD, Karimireddy et al. 2019 (arXiv 1901.09847); signSGD with majority vote and Signum, Bernstein et al.
2018 (arXiv 1802.04434, 1810.05291); 1-bit SGD, Seide et al. 2014; 1-bit Adam, Tang et al. 2021 (arXiv 2102.02888).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from horo_lite.compression.backend import backend_of, quiet
from horo_lite.compression.base import Bucket, Exchange, Method, State, remembered
from horo_lite.compression.codecs import Codec, SignCodec, UniformCodec, VoteCodec
from horo_lite.compression.exchange import (
    Chunk,
    Coded,
    average,
    chunks,
    gathered,
    pays_to_scatter,
    scattered,
    two_rounds,
)
from horo_lite.compression.momentum import keep_velocity, velocity
from horo_lite.errors import ArgumentError
from horo_lite.interfaces import Array, Group


@dataclasses.dataclass(frozen=True, repr=False)
class Sign(Coded):
    """sign(x) mean|x| per gradient, gathered; error feedback makes it converge where plain sign descent fails.

    Args:
        feedback: keep what was not sent for the next step.
    """

    feedback: bool = dataclasses.field(default=True, kw_only=True)

    def codec(self) -> Codec:
        return SignCodec()


@dataclasses.dataclass(frozen=True, repr=False)
class OneBit(Method):
    """As ``sign``, with compressed reduce-scatter and all-gather: bytes sent do not grow with the ranks.

    Each rank averages one chunk and sends it on as signs again. What that leaves out it adds to its
    chunk at the next step: the server-side error of 1-bit Adam, in ``state["server_residual"]``.

    Args:
        feedback: keep what was not sent, on both sides, for the next step.
    """

    feedback: bool = dataclasses.field(default=True, kw_only=True)

    def exchange(self, bucket: Bucket, states: Sequence[State], group: Group) -> Exchange:
        chunk = chunks(bucket.layout, group.size)[group.index]

        def combine(arrays: Sequence[Array]) -> Array:
            mean = average(arrays)
            return _with_carried(mean, chunk, bucket, states) if self.feedback else mean

        rounds = yield from two_rounds(SignCodec(), bucket, None, group, combine)
        if self.feedback and bucket.backend.finite(rounds.mean):
            _carry(rounds.error(), chunk, bucket, states)
        return bucket.reduced(rounds.mean, lambda: bucket.backend.join(rounds.sent()))


@quiet
def _with_carried(mean: Array, chunk: Chunk, bucket: Bucket, states: Sequence[State]) -> Array:
    """The chunk's mean plus what earlier steps left out of it (in place)."""
    for piece, start, state in _owned(mean, chunk, bucket, states):
        kept = remembered(state, "server_residual", len(piece), bucket.backend, bucket.work_type)
        if kept is not None and state.get("server_start") == start:
            piece += kept
    return mean


def _carry(error: Array, chunk: Chunk, bucket: Bucket, states: Sequence[State]) -> None:
    for piece, start, state in _owned(error, chunk, bucket, states):
        state["server_residual"] = bucket.backend.copy(piece)
        state["server_start"] = start


def _owned(
    flat: Array, chunk: Chunk, bucket: Bucket, states: Sequence[State]
) -> Iterator[tuple[Array, int, State]]:
    """The gradients that reach into this rank's chunk: the part of ``flat``, where it starts in them, the state."""
    pieces, starts = chunk.layout.split(flat), bucket.layout.starts()
    for piece, first, state in zip(pieces, starts, states, strict=True):
        if len(piece):
            yield piece, max(0, chunk.cut.start - first), state


@dataclasses.dataclass(frozen=True, repr=False)
class Signum(Method):
    """The majority's sign of the local momenta: 1, -1, or 0 on a tie, whatever the magnitudes.

    For an optimizer without momentum of its own and with a small learning rate: every element moves by it. From three
    ranks on the votes are counted by chunks' owners, who send 2 bits on: 3 (N-1)/N payloads a rank instead of N-1.

    Args:
        momentum: of each rank's own average of gradients; 0 for plain signSGD with majority vote.
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ArgumentError(
                f"momentum is {self.momentum!r}; expected 0 or more and below 1, as in Compression.signum(0.9)"
            )

    @property
    def keeps_state(self) -> bool:
        return self.momentum > 0

    def exchange(self, bucket: Bucket, states: Sequence[State], group: Group) -> Exchange:
        flat = velocity(bucket, states, self.momentum, 1 - self.momentum)
        votes = bucket.replaced(flat)
        if pays_to_scatter(bucket, group):
            ternary = UniformCodec(2)
            reduced = yield from scattered(VoteCodec(), votes, None, group, majority, ternary)
        else:
            reduced = yield from gathered(VoteCodec(), votes, None, group, majority)
        if self.momentum and bucket.backend.finite(bucket.backend.join(reduced.mean)):
            keep_velocity(flat, bucket, states)
        return reduced


@quiet
def majority(arrays: Sequence[Array]) -> Array:
    """The sign of the sum of signs, in the first array."""
    total = arrays[0]
    for array in arrays[1:]:
        total += array
    backend_of(total).xp.sign(total, out=total)
    return total
