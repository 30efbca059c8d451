"""Where each rank's chunk of a flat buffer begins and ends.

Offsets are a tuple of N + 1 numbers: chunk i of ``buffer`` is ``buffer[offsets[i]:offsets[i +
1]]``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from horo_lite.interfaces import Array


@functools.lru_cache(maxsize=4096)
def even_counts(elements: int, parts: int) -> tuple[int, ...]:
    """``elements`` in chunks that differ by one element at most, the larger ones first."""
    quotient, remainder = divmod(elements, parts)
    return (quotient + 1,) * remainder + (quotient,) * (parts - remainder)


@functools.lru_cache(maxsize=4096)
def even_offsets(elements: int, parts: int) -> tuple[int, ...]:
    """Where the chunks of ``even_counts`` begin."""
    return offsets_of(even_counts(elements, parts))


def offsets_of(counts: Sequence[int]) -> tuple[int, ...]:
    """Where chunks of these lengths begin when they lie one behind the other."""
    return tuple(itertools.accumulate(counts, initial=0))


def chunks(buffer: Array, offsets: Sequence[int]) -> list[Array]:
    """The chunks as views."""
    return [buffer[start:stop] for start, stop in itertools.pairwise(offsets)]


def segments_of(longest_elements: int, segment_elements: int) -> int:
    """In how many segments every chunk travels, the longest one having ``longest_elements``."""
    return max(1, -(-longest_elements // segment_elements))


def segment_of(offsets: Sequence[int], chunk: int, segment: int, segments: int) -> slice:
    """Where one of a chunk's segments lies; they differ by one element at most."""
    start = offsets[chunk]
    length = offsets[chunk + 1] - start
    return slice(start + length * segment // segments, start + length * (segment + 1) // segments)
