"""PowerSGD: each matrix as the product of two thin ones, found by one step of power iteration.

Vogels et al. 2019 (arXiv 1905.13727). Two all-reduces a bucket, on which everything travels by summation:
``low_rank * (rows + columns)`` floats for a matrix, and vectors whole.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Generator, Sequence
from typing import NamedTuple

from horo_lite.compression.backend import Backend, quiet
from horo_lite.compression.base import (
    Bucket,
    Exchange,
    Layout,
    Method,
    State,
    check_between,
    remembered,
)
from horo_lite.errors import ArgumentError
from horo_lite.interfaces import Array, Group, SumRequest


class Matrix(NamedTuple):
    """A gradient that is compressed, and where it is in the bucket."""

    place: int
    rows: int
    columns: int
    low_rank: int


@dataclasses.dataclass(frozen=True, repr=False)
class PowerSGD(Method):
    """P = M Q^T, summed and made orthonormal; Q = P^T M, summed; the mean is P Q.

    It keeps its residual itself, since what bounds it is memory: the old residual is added to the gradient, multiplied
    and written in one pass. With those that give Q, the mean and the new residual, that is seven reads and writes of
    each element.

    The right factor is kept from step to step (warm start), which makes single steps of power
    iteration converge to the leading singular vectors. Parameters with one dimension, and matrices
    that would not shrink by ``min_ratio``, travel uncompressed. Shapes come from ``bind``: without it
    every gradient is a vector.

    A ``(out, in, height, width)`` kernel is a matrix of ``out`` rows, as in the paper, whose Q is
    kept transposed here: rows of M are then read in order.

    Args:
        rank: the number of columns of P and Q.
        min_ratio: compress a matrix only if that makes it so many times smaller.
        seed: of the first right factor; the same on all ranks.
        feedback: keep what was not sent for the next step.
    """

    rank: int = 4
    min_ratio: float = dataclasses.field(default=2.0, kw_only=True)
    seed: int = dataclasses.field(default=0, kw_only=True)
    feedback: bool = dataclasses.field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ArgumentError(
                f"rank is {self.rank!r}; expected 1 or more, as in Compression.powersgd(4)"
            )
        check_between(
            "min_ratio", self.min_ratio, 0, math.inf, "Compression.powersgd(4, min_ratio=2)"
        )

    own_feedback = True

    @property
    def keeps_state(self) -> bool:
        return self.feedback

    def exchange(self, bucket: Bucket, states: Sequence[State], group: Group) -> Exchange:
        backend, matrices = bucket.backend, self._matrices(bucket.layout)
        compressed = {m.place for m in matrices}
        pieces = bucket.layout.split(bucket.flat)
        vectors = [
            self._whole(piece, state, bucket)
            for place, (piece, state) in enumerate(zip(pieces, states, strict=True))
            if place not in compressed
        ]
        views, lefts = [], []
        for m in matrices:
            view, left = self._first_product(m, pieces[m.place], states[m.place], bucket)
            views.append(view)
            lefts.append(left.reshape(-1))

        lefts, mean_vectors = yield from _mean(lefts, vectors, backend, group)
        bases = [
            backend.orthonormal(_normalised(left.reshape(m.rows, m.low_rank), backend))
            for left, m in zip(lefts, matrices, strict=True)
        ]
        own = [
            _product(basis.T, view).reshape(-1) for view, basis in zip(views, bases, strict=True)
        ]
        means: list[Array] = []
        if own:
            means, _ = yield from _mean(own, [], backend, group)

        mean = _assembled(bucket, matrices, bases, means, mean_vectors)
        if self._finite([*means, *mean_vectors], mean, backend):
            for m, factor in zip(matrices, means, strict=True):
                self._remember(factor, states[m.place], backend)
            if self.feedback:
                for state in states:
                    state.pop("residual", None)  # a vector leaves none
                for m, view, basis, factor in zip(matrices, views, bases, own, strict=True):
                    backend.subtract_product(view, basis, factor.reshape(m.low_rank, m.columns))
                    states[m.place]["residual"] = view.reshape(-1)
        return bucket.reduced(mean, lambda: _assembled(bucket, matrices, bases, own, vectors))

    def _whole(self, piece: Array, state: State, bucket: Bucket) -> Array:
        """An uncompressed gradient, with what another method may have left of it."""
        residual = self._residual(piece, state, bucket)
        return piece if residual is None else _sum(piece, residual)

    def _first_product(
        self, m: Matrix, piece: Array, state: State, bucket: Bucket
    ) -> tuple[Array, Array]:
        """M, with feedback in new memory that becomes the residual, and M Q^T. (rows, columns), (rows, low_rank)"""
        backend, right = bucket.backend, self._right(m, bucket, state)
        gradient = piece.reshape(m.rows, m.columns)
        if not self.feedback:
            return gradient, _product(gradient, right.T)
        residual = self._residual(piece, state, bucket)
        if residual is None:
            residual = backend.zeros(len(piece), bucket.work_type)
        out = backend.empty(len(piece), bucket.work_type).reshape(m.rows, m.columns)
        left = backend.product_of_sum(out, gradient, residual.reshape(m.rows, m.columns), right.T)
        return out, left

    def _residual(self, piece: Array, state: State, bucket: Bucket) -> Array | None:
        if not self.feedback:
            return None
        return remembered(state, "residual", len(piece), bucket.backend, bucket.work_type)

    def _finite(self, parts: Sequence[Array], mean: Array, backend: Backend) -> bool:
        """Whether a mean is finite, from its parts where they tell: they are far smaller than it."""
        return backend.finite(_scaled(backend.join(parts), self.rank)) or backend.finite(mean)

    def _matrices(self, layout: Layout) -> list[Matrix]:
        """The gradients that pay to compress."""
        out = []
        for index, parameter in enumerate(self.parameters):
            if len(parameter.shape) < 2 or not layout.sizes[index]:
                continue
            rows, columns = parameter.shape[0], math.prod(parameter.shape[1:])
            low_rank = min(self.rank, rows, columns)
            if rows * columns >= self.min_ratio * low_rank * (rows + columns):
                out.append(Matrix(index, rows, columns, low_rank))
        return out

    def _right(self, m: Matrix, bucket: Bucket, state: State) -> Array:
        """The last step's right factor, or the same random one on all ranks. (low_rank, columns)"""
        backend, elements = bucket.backend, m.columns * m.low_rank
        right = remembered(state, "warm_start", elements, backend, bucket.work_type)
        if right is None:
            name = zlib.crc32(self.parameters[m.place].name.encode())
            random = backend.generator(self.seed, name, elements)
            right = backend.normal(random, elements, bucket.work_type)
        return right.reshape(m.low_rank, m.columns)

    def _remember(self, factor: Array, state: State, backend: Backend) -> None:
        """Keep a right factor, but not one of zeros: nothing would ever come out of it again."""
        scaled = _normalised(factor, backend)
        if scaled.any():
            state["warm_start"] = scaled


def _mean(
    packed: Sequence[Array], whole: Sequence[Array], backend: Backend, group: Group
) -> Generator[SumRequest, Array, tuple[list[Array], list[Array]]]:
    """The means of factors and of uncompressed gradients, in one request."""
    arrays = [*packed, *whole]
    reply = yield SumRequest(backend.join(arrays), 1.0 / group.size)
    parts = Layout(tuple(len(a) for a in arrays)).split(reply)
    return parts[: len(packed)], parts[len(packed) :]


@quiet
def _product(a: Array, b: Array) -> Array:
    return a @ b


@quiet
def _sum(a: Array, b: Array) -> Array:
    return a + b


@quiet
def _scaled(a: Array, factor: float) -> Array:
    return a * factor


@quiet
def _normalised(array: Array, backend: Backend) -> Array:
    """Divided by the largest magnitude, so that neither powers nor norms of it leave the type's range."""
    peak = backend.peak(array)
    return array / backend.xp.where(peak == 0, backend.xp.ones_like(peak), peak)


@quiet
def _assembled(
    bucket: Bucket,
    matrices: Sequence[Matrix],
    bases: Sequence[Array],
    factors: Sequence[Array],
    vectors: Sequence[Array],
) -> Array:
    """The bucket from its parts, as a new flat array."""
    out = bucket.backend.empty(bucket.layout.total, bucket.work_type)
    pieces = bucket.layout.split(out)
    for m, basis, factor in zip(matrices, bases, factors, strict=True):
        target = pieces[m.place].reshape(m.rows, m.columns)
        bucket.backend.product(target, basis, factor.reshape(m.low_rank, m.columns))
    compressed = {m.place for m in matrices}
    rest = iter(vectors)
    for index, piece in enumerate(pieces):
        if index not in compressed:
            bucket.backend.assign(piece, next(rest))
    return out
