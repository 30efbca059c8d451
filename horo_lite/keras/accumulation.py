"""Gradients of several passes added up on each rank (``backward_passes_per_step``).

The sums are variables of their own, in no optimizer's ``variables``: a saved optimizer is the wrapped one's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from horo_lite.keras.backend import bridge


class Accumulator:
    """Sums of gradients, and the number of passes that are in them.

    Args:
        variables: all that the optimizer was built with.
        passes: the sums are handed on at every so many calls.
        average: divided by that number.
    """

    def __init__(self, variables: Sequence[Any], passes: int, average: bool) -> None:
        self._passes = passes
        self._average = average
        self._sums = {
            id(bridge().native(variable)): keras.Variable(
                "zeros", shape=tuple(variable.shape), dtype=_type_name(variable), trainable=False, name="accumulated"
            )
            for variable in variables
        }
        self._count = keras.Variable(0, dtype="int32", trainable=False, name="accumulated_passes")
        self._given: set[int] = set()

    def add(
        self, gradients: Sequence[Any], variables: Sequence[Any], apply: Callable[[list[Any]], None]
    ) -> None:
        """Add one pass; on the last of a window call ``apply`` with the sums and begin anew.

        A gradient that no pass had is None. In a graph both branches are traced.
        """
        keys = [id(bridge().native(variable)) for variable in variables]
        for key, gradient in zip(keys, gradients, strict=True):
            if gradient is not None:
                self._given.add(key)
                self._sums[key].assign_add(keras.ops.cast(bridge().dense(gradient), self._sums[key].dtype))
        self._count.assign_add(1)

        def update() -> None:
            factor = 1.0 / self._passes if self._average else 1.0
            apply([self._sums[key].value * factor if key in self._given else None for key in keys])
            for total in self._sums.values():
                total.assign(keras.ops.zeros_like(total))  # not times zero: a window with a NaN ends with it
            self._count.assign(0)

        keras.ops.cond(self._count >= self._passes, update, lambda: None)


def _type_name(variable: Any) -> str:
    return keras.backend.standardize_dtype(variable.dtype)
