"""What differs between Keras' backends: how gradients reach the buckets.

Only the active backend's module is imported.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import keras

from horo_lite.errors import ArgumentError
from horo_lite.exchange_options import ExchangeOptions

_MODULES = {
    "tensorflow": "horo_lite.keras.on_tensorflow",
    "torch": "horo_lite.keras.on_torch",
}


class Reducer(Protocol):
    """Reduces the gradients of one list of variables, step after step."""

    context: Any
    """The world it was made in."""

    @property
    def states(self) -> Mapping[str, MutableMapping[str, Any]]:
        """By parameter's name, what a compressor keeps from step to step."""
        ...

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """This step's gradients, reduced over all ranks; None where no rank has one."""
        ...


class Bridge(Protocol):
    """A backend's module."""

    graph_errors: tuple[type[Exception], ...]
    """As what the backend raises an error of ours within a graph; it keeps the text alone."""

    def native(self, variable: Any) -> Any:
        """The backend's own variable or tensor behind a Keras one."""
        ...

    def compression(self, compression: Any) -> Any:
        """What the engine is given for ``compression``; None for no compression."""
        ...

    def make_reducer(
        self, options: ExchangeOptions, variables: Sequence[Any], gradients: Sequence[Any], share: bool
    ) -> Reducer:
        """Collective over the process set.

        Args:
            variables: Keras variables.
            gradients: the first step's.
            share: results may be views of the buckets, valid until the next step.
        """
        ...

    def dense(self, gradient: Any) -> Any:
        """A sparse gradient as a dense one."""
        ...

    def all_true(self, flag: Any, options: ExchangeOptions, name: str) -> Any:
        """A boolean tensor: true where ``flag`` is true on all ranks."""
        ...

    def to_array(self, value: Any) -> Any:
        """A tensor, variable or number as a numpy array."""
        ...


@functools.cache
def bridge() -> Bridge:
    """The module of the active backend.

    Raises:
        ArgumentError: there is none for this backend.
    """
    name = keras.backend.backend()
    if name not in _MODULES:
        raise ArgumentError(
            f"Keras runs on its {name!r} backend, for which horo_lite has no bridge; set KERAS_BACKEND to one of "
            f"{', '.join(_MODULES)} before Keras is imported"
        )
    module: Any = importlib.import_module(_MODULES[name])
    return module
