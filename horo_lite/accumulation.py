"""Gradients of several passes added up on each rank (``backward_passes_per_step``), eager and in graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from horo_lite.arrays import numpy_dtype
from horo_lite.exchange_options import ParameterSpec
from horo_lite.interfaces import Array


class Host(Protocol):
    """What a framework does for it."""

    def dense(self, gradient: Any, type_name: str) -> Any:
        """A gradient, perhaps sparse, as a dense one of a type."""
        ...

    def on_host(
        self,
        function: Callable[[Sequence[Any]], Sequence[Any]],
        tensors: Sequence[Any],
        outputs: Sequence[ParameterSpec],
    ) -> list[Any]:
        """Call a function once, with arrays of these tensors, and return what it returns as tensors.

        In a graph it is called whenever the graph runs. It must not wait for other ranks.
        """
        ...

    def when(self, condition: Any, action: Callable[[], None], variables: Sequence[Any]) -> None:
        """Where a boolean tensor is true, carry out ``action``, which assigns to some of ``variables``."""
        ...


class Window:
    """Sums of gradients since the last update, as arrays: no variables, so no part of what is saved.

    Args:
        passes: an update is due after so many.
        average: divide the sums by that number.
    """

    def __init__(self, passes: int, average: bool) -> None:
        self._passes = passes
        self._factor = 1.0 / passes if average else 1.0
        self._seen = 0
        self._sums: dict[Hashable, Any] = {}

    def add(self, gradients: Mapping[Hashable, Array]) -> bool:
        """Add one pass; True when an update is due."""
        for key, gradient in gradients.items():
            if key in self._sums:
                self._sums[key] += gradient
            else:
                self._sums[key] = copy.deepcopy(gradient)  # of numpy or torch
        self._seen += 1
        return self._seen >= self._passes

    def take(self) -> dict[Hashable, Array]:
        """The sums of what was given, and begin anew: a window with a NaN ends with it."""
        sums, self._sums, self._seen = self._sums, {}, 0
        if self._factor != 1.0:
            for key in sums:
                sums[key] *= self._factor
        return sums


class Accumulator:
    """Adds up gradients in the framework's graphs, and hands the sums on when an update is due."""

    def __init__(self, host: Host, passes: int, average: bool) -> None:
        self._host = host
        self._window = Window(passes, average)
        self._given: set[Hashable] = set()

    def add(
        self,
        gradients: Sequence[Any],
        keys: Sequence[Hashable],
        parameters: Sequence[ParameterSpec],
        apply: Callable[[list[Any]], None],
        assigned: Sequence[Any],
    ) -> None:
        """Add one pass; on the last of a window call ``apply`` with the sums and begin anew.

        A gradient that no pass had is None.

        Args:
            keys: one for each variable, the same in every pass.
            parameters: what the variables are.
            assigned: all variables to which ``apply`` may assign.
        """
        given = [place for place, gradient in enumerate(gradients) if gradient is not None]
        self._given.update(keys[place] for place in given)
        tensors = [self._host.dense(gradients[place], parameters[place][2]) for place in given]

        def add(arrays: Sequence[Any]) -> list[Any]:
            due = self._window.add({keys[place]: array for place, array in zip(given, arrays, strict=True)})
            return [np.array(due)]

        def update() -> None:
            places = [place for place, key in enumerate(keys) if key in self._given]

            def take(_: Sequence[Any]) -> list[Any]:
                sums = self._window.take()
                return [sums.get(keys[place], _zeros(parameters[place])) for place in places]

            sums: list[Any] = [None] * len(keys)
            taken = self._host.on_host(take, [due], [parameters[place] for place in places])
            for place, tensor in zip(places, taken, strict=True):
                sums[place] = tensor
            apply(sums)

        (due,) = self._host.on_host(add, tensors, [("due", (), "bool")])
        self._host.when(due, update, assigned)


def _zeros(parameter: ParameterSpec) -> Any:
    """Of no memory, however large."""
    return np.broadcast_to(np.zeros((), numpy_dtype(parameter[2])), parameter[1])
