"""How encoded buckets become a mean: two schedules of requests, whatever the codec.

With P the payload and N the ranks, bytes sent per rank:

- ``gathered``: every rank receives every payload, (N-1) P. One encoding error, one round.
- ``scattered``: each rank averages one chunk and sends it on encoded anew, 2 (N-1)/N P, which is what
  a ring all-reduce of the payload would take. Two encoding errors, two rounds. The chunk's owner
  counts the second error, N-fold, as its own unsent part: so error feedback around it stays exact.

At two ranks both send P, so ``gathered`` stands.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from horo_lite.compression.backend import quiet
from horo_lite.compression.base import Bucket, Exchange, Layout, Method, State, next_draw
from horo_lite.compression.codecs import Codec
from horo_lite.interfaces import AllToAllRequest, Array, CompressorRequest, GatherRequest, Group

Combine = Callable[[Sequence[Array]], Array]
"""Makes one of the ranks' decoded arrays, which it may overwrite."""


@quiet
def average(arrays: Sequence[Array]) -> Array:
    """The mean, added in rank order so that it has the same bits wherever it is computed; in the first array."""
    total = arrays[0]
    for array in arrays[1:]:
        total += array
    total /= len(arrays)
    return total


class Chunk(NamedTuple):
    """One rank's part of a bucket."""

    cut: slice
    layout: Layout


def chunks(layout: Layout, size: int) -> list[Chunk]:
    """``size`` parts of a bucket, equal but for the last ones, each starting at a multiple of eight."""
    step = -(-layout.total // size // 8) * 8 or 8
    bounds = [min(index * step, layout.total) for index in range(size + 1)]
    bounds[-1] = layout.total
    return [Chunk(slice(a, b), layout.cut(a, b)) for a, b in itertools.pairwise(bounds)]


def gathered(
    codec: Codec, bucket: Bucket, random: Any, group: Group, combine: Combine = average
) -> Exchange:
    """One round: everyone decodes everyone's payload."""
    own = codec.encode(bucket.flat, bucket.layout, random)
    payloads = yield GatherRequest(own)

    def decoded(payload: Array) -> Array:
        return codec.decode(payload, bucket.layout, bucket.work_type)

    mean = combine([decoded(payload) for payload in payloads])
    return bucket.reduced(mean, lambda: decoded(own))


class Rounds(NamedTuple):
    """What two rounds leave: the mean, and what this rank needs to account for both errors."""

    mean: Array
    chunk: Chunk
    """The part that this rank combined."""
    sent: Callable[[], list[Array]]
    """This rank's own chunks as the first encoding stands for them."""
    error: Callable[[], Array]
    """What the second encoding left out of this rank's chunk."""


def two_rounds(
    codec: Codec,
    bucket: Bucket,
    random: Any,
    group: Group,
    combine: Combine = average,
    second: Codec | None = None,
) -> Generator[CompressorRequest, Any, Rounds]:
    """Each rank combines its chunk, then all gather the chunks, encoded by ``second`` (or ``codec``)."""
    parts, name = chunks(bucket.layout, group.size), bucket.work_type
    outgoing = [codec.encode(bucket.flat[part.cut], part.layout, random) for part in parts]
    incoming = yield AllToAllRequest(outgoing)
    chunk = parts[group.index]
    combined = combine([codec.decode(payload, chunk.layout, name) for payload in incoming])
    again = second or codec
    replies = yield GatherRequest(again.encode(combined, chunk.layout, random))
    decoded = [
        again.decode(reply, part.layout, name) for reply, part in zip(replies, parts, strict=True)
    ]

    def sent() -> list[Array]:
        pairs = zip(outgoing, parts, strict=True)
        return [codec.decode(payload, part.layout, name) for payload, part in pairs]

    return Rounds(
        bucket.backend.join(decoded), chunk, sent, quiet(lambda: combined - decoded[group.index])
    )


def scattered(
    codec: Codec,
    bucket: Bucket,
    random: Any,
    group: Group,
    combine: Combine = average,
    second: Codec | None = None,
) -> Exchange:
    """Two rounds; the chunk's owner counts the second error, N-fold, as its own unsent part."""
    rounds = yield from two_rounds(codec, bucket, random, group, combine, second)

    @quiet
    def contributed() -> Array:
        sent = rounds.sent()
        sent[group.index] -= rounds.error() * group.size
        return bucket.backend.join(sent)

    return bucket.reduced(rounds.mean, contributed)


@dataclasses.dataclass(frozen=True, repr=False)
class Coded(Method):
    """The frame of methods that are a codec and nothing more."""

    def recodes(self) -> bool:
        """True where encoding the mean anew costs little, so that ``scattered`` may be used."""
        return False

    def codec(self) -> Codec:
        raise NotImplementedError

    def random(self, bucket: Bucket, states: Sequence[State], group: Group) -> Any:
        """This rank's random numbers for this step; None where none are needed."""
        return None

    def exchange(self, bucket: Bucket, states: Sequence[State], group: Group) -> Exchange:
        random = self.random(bucket, states, group)
        apart = self.recodes() and pays_to_scatter(bucket, group)
        schedule = scattered if apart else gathered
        return (yield from schedule(self.codec(), bucket, random, group))


@dataclasses.dataclass(frozen=True, repr=False)
class Stochastic(Coded):
    """The frame of methods that round at random, so that the result is right on average.

    Args:
        seed: together with rank, step and bucket it fixes every random number.
    """

    seed: int = dataclasses.field(default=0, kw_only=True)

    def random(self, bucket: Bucket, states: Sequence[State], group: Group) -> Any:
        draw = next_draw(states)
        return bucket.backend.generator(self.seed, group.index, draw, self.salt(bucket))


def pays_to_scatter(bucket: Bucket, group: Group) -> bool:
    """Two rounds send less from three ranks on, where chunks are more than scales."""
    return group.size > 2 and bucket.layout.total >= _CHUNK_ELEMENTS * group.size


_CHUNK_ELEMENTS = 64
