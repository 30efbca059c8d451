"""What differs between Keras' backends: how gradients reach the buckets, and how a graph calls back.

Only the active backend's module is imported.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras

from horo_lite.errors import ArgumentError
from horo_lite.exchange_options import ExchangeOptions, ParameterSpec, stable_names, variable_path
from horo_lite.optimizer_exchange import Backend

_MODULES = {
    "tensorflow": "horo_lite.tensorflow.backend",
    "torch": "horo_lite.keras.on_torch",
    "jax": "horo_lite.keras.on_jax",
}


class Bridge(Backend, Protocol):
    """A backend's module."""

    graph_errors: tuple[type[Exception], ...]
    """As what the backend raises an error of ours within a graph; it keeps the text alone."""

    def uncompiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What a backend that compiles by following Python's steps is to leave to Python."""
        ...

    def in_update(self, optimizer: Any, action: Callable[[], Any], otherwise: Any) -> Any:
        """Called where Keras clips: ``action()`` where its accumulation (``gradient_accumulation_steps``) is complete.

        Args:
            otherwise: what is returned elsewhere; of the same shapes and types.
        """
        ...

    def settle(self) -> None:
        """Wait until this rank's steps that are under way have taken part in all their exchanges."""
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


def parameters(variables: Sequence[Any]) -> list[ParameterSpec]:
    """``Backend.parameters`` where types go by Keras' names."""
    names = stable_names([variable_path(variable) for variable in variables])
    return [
        (name, tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype))
        for name, variable in zip(names, variables, strict=True)
    ]
