"""How encoded buckets become a mean: two schedules of requests, whatever the codec.

With P the payload and N the ranks, bytes sent per rank:

- ``gathered``: every rank receives every payload, (N-1) P. One encoding error, one round.
- ``scattered``: each rank averages one chunk and sends it on encoded anew, 2 (N-1)/N P: what a ring all-reduce of the
  payload would take. Two encoding errors, two rounds. The chunk's owner counts the second error, N-fold, as its own
  unsent part, so that error feedback around it stays exact.

At two ranks both send P, so ``gathered`` stands.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from horo_lite.compression.backend import quiet
from horo_lite.compression.base import Bucket, Exchange, Layout
from horo_lite.compression.codecs import Codec
from horo_lite.interfaces import AllToAllRequest, Array, GatherRequest, Group

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


def scattered(
    codec: Codec,
    bucket: Bucket,
    random: Any,
    group: Group,
    combine: Combine = average,
    second: Codec | None = None,
) -> Exchange:
    """Two rounds: each rank combines its chunk, then all gather the chunks, encoded by ``second`` (or ``codec``)."""
    parts, name = chunks(bucket.layout, group.size), bucket.work_type
    outgoing = [codec.encode(bucket.flat[part.cut], part.layout, random) for part in parts]
    incoming = yield AllToAllRequest(outgoing)
    mine = parts[group.index].layout
    combined = combine([codec.decode(payload, mine, name) for payload in incoming])
    again = second or codec
    own = again.encode(combined, mine, random)
    replies = yield GatherRequest(own)
    decoded = [
        again.decode(reply, part.layout, name) for reply, part in zip(replies, parts, strict=True)
    ]

    def contributed() -> Array:
        sent = [codec.decode(p, part.layout, name) for p, part in zip(outgoing, parts, strict=True)]
        sent[group.index] += (decoded[group.index] - combined) * group.size
        return bucket.backend.join(sent)

    return bucket.reduced(bucket.backend.join(decoded), contributed)
