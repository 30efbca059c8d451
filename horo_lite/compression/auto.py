"""Compression where it pays: the first steps of every bucket try the candidates, the rest use the fastest.

What is timed is the whole exchange, from gradients to means: encoding, the wire under its real load, decoding. So no
model of links and processors is needed, and what is never faster than no compression is never chosen.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from horo_lite.compression.backend import backend_of, is_floating
from horo_lite.compression.base import Exchange, Method, State, next_draw
from horo_lite.compression.casts import BFloat16, NoCompression
from horo_lite.compression.feedback import WithFeedback
from horo_lite.compression.quantize import Int8
from horo_lite.compression.resolve import as_compressor, is_compression, keeps_state
from horo_lite.interfaces import (
    Array,
    Compressor,
    CompressorRequest,
    GatherRequest,
    Group,
    Parameter,
)

_log = logging.getLogger("horo_lite")


@dataclasses.dataclass(frozen=True, repr=False)
class Auto(Method):
    """Tries each candidate on real steps and keeps the fastest, per bucket; logs what it chose.

    Every rank's times are gathered, and each candidate counts by its slowest rank, so all ranks
    choose alike. No compression is always a candidate, and the choice unless another one is faster
    by ``margin``. With no compression, what earlier candidates left unsent is sent first.

    Args:
        candidates: compressions as in ``compression=``; by default those that need no tuning.
        trials: steps per candidate; its best one counts.
        margin: by what share of the uncompressed time a candidate must be faster.
        clock: seconds.
    """

    candidates: Sequence[Any] = (BFloat16, Int8)
    trials: int = dataclasses.field(default=3, kw_only=True)
    margin: float = dataclasses.field(default=0.05, kw_only=True)
    clock: Callable[[], float] = dataclasses.field(
        default=time.perf_counter, kw_only=True, compare=False
    )

    def __post_init__(self) -> None:
        several = (self.candidates,) if is_compression(self.candidates) else self.candidates
        given = [as_compressor(candidate) for candidate in several]
        others = [candidate for candidate in given if not isinstance(candidate, NoCompression)]
        object.__setattr__(self, "candidates", (NoCompression(), *others))

    def __repr__(self) -> str:
        return f"auto({', '.join(map(repr, self.candidates))}, trials={self.trials})"

    @property
    def keeps_state(self) -> bool:
        return True

    def bind(self, parameters: Sequence[Parameter]) -> Auto:
        bound = [candidate.bind(parameters) for candidate in self.candidates]
        return self.altered(candidates=bound, parameters=tuple(parameters))

    def reduce(self, gradients: Sequence[Array], states: Sequence[State], group: Group) -> Exchange:
        if not gradients or not is_floating(gradients[0]):
            return (yield from self.candidates[0].reduce(gradients, states, group))
        step, notes, count = next_draw(states, "auto_step"), states[0], len(self.candidates)
        last_trial = self.trials * count - 1
        chosen = step % count if step <= last_trial else int(notes.get("auto_choice", 0))
        start = self.clock()
        reduced = yield from self._way(chosen, step <= last_trial + 1).reduce(
            gradients, states, group
        )
        took = self.clock() - start
        if step <= last_trial:
            times = self._times(notes)
            times[chosen] = min(took, times[chosen]) if times[chosen] else took
            notes["auto_times"] = times
        if step == last_trial:
            yield from self._decide(notes, gradients[0], group)
        return reduced

    def _times(self, notes: State) -> np.ndarray[Any, Any]:
        """The best seconds of each candidate so far; 0 before its first trial, and on a rank that has joined."""
        times = notes.get("auto_times")
        if times is None or len(times) != len(self.candidates):
            return np.zeros(len(self.candidates))
        return np.array(times, np.float64)

    def _way(self, chosen: int, after_another: bool) -> Compressor:
        """The compressor of a step; no compression right after another candidate sends what that one left."""
        if chosen == 0 and after_another and any(map(keeps_state, self.candidates)):
            return WithFeedback(self.candidates[0])
        return self.candidates[chosen]

    def _decide(
        self, notes: State, like: Array, group: Group
    ) -> Generator[CompressorRequest, Any, None]:
        backend = backend_of(like)
        own = self._times(notes)
        payloads = yield GatherRequest(backend.indices(own.view(np.uint8)))
        times = np.array([np.frombuffer(backend.to_host(p).tobytes()) for p in payloads]).max(
            axis=0
        )
        best = int(times.argmin())
        choice = best if times[best] < times[0] * (1 - self.margin) else 0
        notes["auto_choice"] = choice
        if group.index == 0:
            # A warning so that it is seen: what is on the wire from now on depends on it.
            _log.warning(
                "compression of %s: chose %r, %.2f ms a step; tried %s",
                self._what(),
                self.candidates[choice],
                times[choice] * 1e3,
                ", ".join(
                    f"{c!r} {t * 1e3:.2f} ms" for c, t in zip(self.candidates, times, strict=True)
                ),
            )

    def _what(self) -> str:
        if not self.parameters:
            return "a bucket"
        return f"the bucket of {self.parameters[0].name} ({len(self.parameters)} parameters)"
