"""Several ranks in one process, for what depends on a compressor's values and not on time.

A compressor never communicates: it asks. So N of them can be stepped together, each with a rank's own gradients and
states, and their requests answered exactly as an engine would answer them. What comes out is what N processes would
hold, for the price of their arithmetic alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horo_lite.compression import as_compressor
from horo_lite.interfaces import (
    AllToAllRequest,
    CompressorRequest,
    GatherRequest,
    Group,
    Parameter,
    Reduced,
    SumRequest,
)


class World:
    """The exchange of one bucket of float gradients by ``size`` ranks, with their states from step to step.

    Args:
        compression: as in ``compression=``.
        parameters: what the bucket holds.
        size: the number of ranks.
    """

    def __init__(self, compression: Any, parameters: Sequence[Parameter], size: int) -> None:
        self._compressors = [as_compressor(compression).bind(parameters) for _ in range(size)]
        self._states: list[list[dict[str, Any]]] = [[{} for _ in parameters] for _ in range(size)]

    def mean(self, gradients: Sequence[Sequence[np.ndarray]]) -> Sequence[np.ndarray]:
        """What every rank receives. ``gradients[rank]`` are that rank's flat arrays, one per parameter."""
        size = len(self._compressors)
        ranks = [
            compressor.reduce(arrays, states, Group.whole(rank, size))
            for rank, (compressor, arrays, states) in enumerate(
                zip(self._compressors, gradients, self._states, strict=True)
            )
        ]
        replies: list[Any] = [None] * size
        while True:
            requests: list[CompressorRequest] = []
            results: list[Reduced] = []
            for rank, reply in zip(ranks, replies, strict=True):
                try:
                    requests.append(rank.send(reply))
                except StopIteration as end:
                    results.append(end.value)
            if results:  # all end in the same round, or none
                return results[0].mean
            replies = _replies(requests)


def _replies(requests: Sequence[Any]) -> list[Any]:
    first = requests[0]
    if isinstance(first, SumRequest):
        total = np.sum([request.array for request in requests], axis=0, dtype=np.float64) * first.scale
        return [total.astype(first.array.dtype) for _ in requests]
    if isinstance(first, GatherRequest):
        return [[request.payload for request in requests] for _ in requests]
    if isinstance(first, AllToAllRequest):
        return [[request.payloads[rank] for request in requests] for rank in range(len(requests))]
    raise TypeError(f"no answer to {type(first).__name__}")
