"""Optimizers of legacy Keras (the ``tf_keras`` package, ``TF_USE_LEGACY_KERAS=1``).

They compute, reduce and apply in separate public steps, any of which a script may call, so a gradient that
``compute_gradients`` has reduced must not be reduced again by ``apply_gradients``.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import tensorflow as tf

from horo_lite.optimizer_exchange import OptimizerExchange, settings_for
from horo_lite.tensorflow import backend


def is_legacy(optimizer: Any) -> bool:
    """True for an optimizer of ``tf_keras``, old or new."""
    legacy = sys.modules.get("tf_keras")
    return legacy is not None and isinstance(
        optimizer, (legacy.optimizers.Optimizer, legacy.optimizers.legacy.Optimizer)
    )


class _Exchange(OptimizerExchange):
    """What one wrapped optimizer needs besides its own state."""

    reduced = False
    """By ``compute_gradients``; ``apply_gradients`` does not reduce again."""


class _Legacy:
    """What a wrapped class has in front of the class it wraps."""

    horo_lite: _Exchange

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable stays this rank's own."""
        self.horo_lite.local.append(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute gradients and reduce them."""
        return self._reduced(list(super().compute_gradients(*args, **kwargs)))  # type: ignore[misc]

    def _compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The same of ``tf_keras.optimizers.legacy``, whose ``minimize`` calls it."""
        return self._reduced(list(super()._compute_gradients(*args, **kwargs)))  # type: ignore[misc]

    def _reduced(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        if self.horo_lite.settings.passes > 1 or not pairs:
            return pairs
        gradients, variables = zip(*pairs, strict=True)
        self.horo_lite.reduced = True
        return list(zip(self.horo_lite.reduce(gradients, variables), variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce the gradients, unless ``compute_gradients`` has, and apply them."""
        pairs = list(grads_and_vars)
        step = super().apply_gradients  # type: ignore[misc]
        exchange = self.horo_lite
        if exchange.reduced or not pairs:
            exchange.reduced = False
            return step(pairs, *args, **kwargs)
        gradients, variables = zip(*pairs, strict=True)
        if exchange.settings.passes == 1:
            reduced = exchange.reduce(gradients, variables)
            return step(list(zip(reduced, variables, strict=True)), *args, **kwargs)
        with tf.init_scope():
            getattr(self, "build", lambda _: None)(list(variables))

        def update(sums: list[Any]) -> None:
            step(list(zip(exchange.reduce(sums, variables), variables, strict=True)), *args, **kwargs)

        exchange.accumulate(gradients, variables, update)
        return cast(Any, self).iterations


def wrap(optimizer: Any, name: str | None, keywords: dict[str, Any]) -> Any:
    """A legacy optimizer that reduces its gradients; the keywords are those of ``DistributedOptimizer``."""
    settings = settings_for(optimizer, backend, **keywords)
    config = optimizer.get_config()
    if name is not None:
        config["name"] = name
    wrapped = _wrapped_class(type(optimizer)).from_config(config)
    wrapped.horo_lite = _Exchange(settings, backend)
    return wrapped


def _wrapped_class(base: Any) -> Any:
    body = {"__module__": base.__module__, "__doc__": base.__doc__}
    return type(base.__name__, (_Legacy, base), body)


def is_in_use() -> bool:
    """True where ``tf.keras`` is legacy Keras."""
    legacy = sys.modules.get("tf_keras")
    return legacy is not None and tf.keras.Model is legacy.Model


def load_model(path: Any, known: dict[str, Any]) -> Any:
    """A saved model, with its plain optimizer."""
    return sys.modules["tf_keras"].models.load_model(path, custom_objects=known)


def rewrap(model: Any, keywords: dict[str, Any]) -> None:
    """Let a loaded model's optimizer, which keeps its state, reduce its gradients."""
    optimizer = model.optimizer
    settings = settings_for(optimizer, backend, **keywords)
    optimizer.__class__ = _wrapped_class(type(optimizer))
    optimizer.horo_lite = _Exchange(settings, backend)
    model.train_function = None  # made when it trains
