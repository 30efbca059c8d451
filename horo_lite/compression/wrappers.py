"""Compressors made of other compressors: by size, by name, by step."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

from horo_lite.compression.base import Deferred, Exchange, Method, State, check_count, next_draw
from horo_lite.compression.casts import NoCompression
from horo_lite.compression.resolve import as_compressor, keeps_state
from horo_lite.errors import ArgumentError
from horo_lite.interfaces import Array, Compressor, Group, Parameter, Reduced

Part = tuple[Compressor, tuple[int, ...]]
"""A compressor and the gradients of a bucket that go through it."""


@dataclasses.dataclass(frozen=True, repr=False)
class Split(Method):
    """A bucket whose gradients take different ways, one way after the other."""

    parts: tuple[Part, ...]

    def __repr__(self) -> str:
        return f"split({', '.join(f'{compressor!r}: {len(members)}' for compressor, members in self.parts)})"

    @property
    def keeps_state(self) -> bool:
        return any(keeps_state(compressor) for compressor, _ in self.parts)

    def bind(self, parameters: Sequence[Parameter]) -> Split:
        return self

    def reduce(self, gradients: Sequence[Array], states: Sequence[State], group: Group) -> Exchange:
        means: dict[int, Array] = {}
        contributed: dict[int, tuple[Sequence[Array], int]] = {}
        for compressor, members in self.parts:
            some, some_states = [gradients[i] for i in members], [states[i] for i in members]
            reduced = yield from compressor.reduce(some, some_states, group)
            for place, index in enumerate(members):
                means[index] = reduced.mean[place]
                contributed[index] = reduced.contributed, place
        order = range(len(gradients))

        def looked_up() -> list[Array]:
            return [sequence[place] for sequence, place in map(contributed.__getitem__, order)]

        return Reduced([means[index] for index in order], Deferred(looked_up))


def split(routes: Sequence[Compressor], parameters: Sequence[Parameter] | None = None) -> Split:
    """The ``Split`` that sends gradient i through ``routes[i]``, each compressor bound to its own gradients."""
    members: dict[int, list[int]] = {}
    for index, compressor in enumerate(routes):
        members.setdefault(id(compressor), []).append(index)
    parts = []
    for indices in members.values():
        compressor = routes[indices[0]]
        if parameters is not None:
            compressor = compressor.bind([parameters[i] for i in indices])
        parts.append((compressor, tuple(indices)))
    return Split(tuple(parts))


@dataclasses.dataclass(frozen=True, repr=False)
class MinSize(Method):
    """Gradients below a size travel uncompressed: biases and norms cost little and matter much."""

    inner: Compressor
    elements: int

    def __repr__(self) -> str:
        return f"min_size({self.inner!r}, {self.elements})"

    @property
    def keeps_state(self) -> bool:
        return keeps_state(self.inner)

    def bind(self, parameters: Sequence[Parameter]) -> Compressor:
        sizes = [math.prod(parameter.shape) for parameter in parameters]
        return split(self._routes(sizes), parameters)

    def reduce(self, gradients: Sequence[Array], states: Sequence[State], group: Group) -> Exchange:
        chosen = split(self._routes([len(gradient) for gradient in gradients]))
        return (yield from chosen.reduce(gradients, states, group))

    def _routes(self, sizes: Sequence[int]) -> list[Compressor]:
        return [self.inner if size >= self.elements else _NONE for size in sizes]


@dataclasses.dataclass(frozen=True, repr=False)
class PerLayer(Method):
    """Each parameter through the compressor of the first pattern that its name matches."""

    patterns: tuple[tuple[str, Compressor], ...]
    default: Compressor

    def __repr__(self) -> str:
        pairs = ", ".join(f"{pattern!r}: {inner!r}" for pattern, inner in self.patterns)
        return f"per_layer({{{pairs}}}, default={self.default!r})"

    @property
    def keeps_state(self) -> bool:
        return any(keeps_state(inner) for _, inner in (*self.patterns, ("", self.default)))

    def bind(self, parameters: Sequence[Parameter]) -> Compressor:
        return split([self._route(parameter.name) for parameter in parameters], parameters)

    def reduce(self, gradients: Sequence[Array], states: Sequence[State], group: Group) -> Exchange:
        raise ArgumentError(
            "per_layer chooses by parameter names, and these gradients have none; pass named_parameters, or a name "
            "to allreduce"
        )

    def _route(self, name: str) -> Compressor:
        matching = (inner for pattern, inner in self.patterns if fnmatch.fnmatchcase(name, pattern))
        return next(matching, self.default)


@dataclasses.dataclass(frozen=True, repr=False)
class Warmup(Method):
    """No compression for the first steps, while gradients change fast."""

    inner: Compressor
    steps: int

    def __repr__(self) -> str:
        return f"warmup({self.inner!r}, {self.steps})"

    @property
    def keeps_state(self) -> bool:
        return keeps_state(self.inner)

    def bind(self, parameters: Sequence[Parameter]) -> Warmup:
        return self.altered(inner=self.inner.bind(parameters))

    def reduce(self, gradients: Sequence[Array], states: Sequence[State], group: Group) -> Exchange:
        chosen = self.inner if next_draw(states, "warmup_steps") >= self.steps else _NONE
        return (yield from chosen.reduce(gradients, states, group))


_NONE = NoCompression()


def min_size(compression: Any, elements: int = 1024) -> MinSize:
    """``compression`` for gradients of at least so many elements, none for the smaller ones."""
    check_count("elements", elements, "Compression.min_size(Compression.topk(0.01), 10_000)")
    return MinSize(as_compressor(compression), elements)


def per_layer(patterns: Mapping[str, Any], default: Any = NoCompression) -> PerLayer:
    """Compression by parameter name.

    Args:
        patterns: from shell-style patterns (``"encoder.*"``, ``"*.bias"``) to compressions; the first match counts.
        default: for names that match none.
    """
    pairs = tuple((pattern, as_compressor(inner)) for pattern, inner in patterns.items())
    return PerLayer(pairs, as_compressor(default))


def warmup(compression: Any, steps: int) -> Warmup:
    """``compression`` after so many steps, none before."""
    check_count("steps", steps, "Compression.warmup(Compression.powersgd(4), steps=500)")
    return Warmup(as_compressor(compression), steps)
