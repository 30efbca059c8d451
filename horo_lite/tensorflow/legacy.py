"""Optimizers of legacy Keras (the ``tf_keras`` package, ``TF_USE_LEGACY_KERAS=1``).

They compute, reduce and apply in separate public steps, any of which a script may call, so a gradient that
``compute_gradients`` has reduced must not be reduced again by ``apply_gradients``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

import tensorflow as tf

from horo_lite.context import current
from horo_lite.errors import ArgumentError
from horo_lite.exchange_options import ExchangeOptions, chosen_groups, reduced_among_local
from horo_lite.functions import Average, Sum, reduction_of
from horo_lite.tensorflow.compression import for_tensorflow
from horo_lite.tensorflow.gradients import GradientReducer
from horo_lite.tensorflow.tape import parameter_specs


def is_legacy(optimizer: Any) -> bool:
    """True for an optimizer of ``tf_keras``, old or new."""
    legacy = sys.modules.get("tf_keras")
    return legacy is not None and isinstance(
        optimizer, (legacy.optimizers.Optimizer, legacy.optimizers.legacy.Optimizer)
    )


class _Exchange:
    """What one wrapped optimizer needs besides its own state."""

    def __init__(self, options: ExchangeOptions, passes: int, average_passes: bool) -> None:
        self.options = options
        self.passes = passes
        self.average_passes = average_passes
        self.local: set[int] = set()
        self.reduced = False  # by compute_gradients; apply_gradients does not reduce again
        self._reducer: GradientReducer | None = None
        self._variables: list[int] = []
        self._sums: list[tf.Variable] = []
        self.count: tf.Variable | None = None

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Gradients as the wrapped optimizer is to see them."""

        def reduce(places: list[int]) -> list[Any]:
            own, chosen = [variables[place] for place in places], [gradients[place] for place in places]
            known = [id(variable) for variable in own]
            if self._reducer is None or known != self._variables or self._reducer.context is not current():
                self._reducer = GradientReducer(self.options, parameter_specs(own), own, chosen)
                self._variables = known
            return self._reducer.reduce(chosen)

        local = [id(variable) in self.local for variable in variables]
        return reduced_among_local(self.options, gradients, local, reduce)

    def accumulate(self, gradients: Sequence[Any], variables: Sequence[Any], apply: Any) -> Any:
        """Add one pass; on the last of a window reduce the sums and apply them."""
        if self.count is None:
            with tf.init_scope():
                self.count = tf.Variable(0, trainable=False, name="accumulated_passes")
                self._sums = [tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in variables]
        for total, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                total.assign_add(tf.cast(tf.convert_to_tensor(gradient), total.dtype))
        self.count.assign_add(1)
        factor = 1.0 / self.passes if self.average_passes else 1.0

        def update() -> tf.Tensor:
            sums = [
                None if gradient is None else total * tf.cast(factor, total.dtype)
                for total, gradient in zip(self._sums, gradients, strict=True)
            ]
            apply(self.reduce(sums, variables))
            for total in self._sums:
                total.assign(tf.zeros_like(total))
            cast(Any, self.count).assign(0)
            return tf.constant(True)

        return tf.cond(self.count >= self.passes, update, lambda: tf.constant(False))


class _Legacy:
    """What a wrapped class has in front of the class it wraps."""

    horo_lite: _Exchange

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable stays this rank's own."""
        self.horo_lite.local.add(id(var))

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute gradients and reduce them."""
        return self._reduced(list(super().compute_gradients(*args, **kwargs)))  # type: ignore[misc]

    def _compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The same of ``tf_keras.optimizers.legacy``, whose ``minimize`` calls it."""
        return self._reduced(list(super()._compute_gradients(*args, **kwargs)))  # type: ignore[misc]

    def _reduced(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        if self.horo_lite.passes > 1 or not pairs:
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
        if exchange.passes == 1:
            reduced = exchange.reduce(gradients, variables)
            return step(list(zip(reduced, variables, strict=True)), *args, **kwargs)
        with tf.init_scope():
            getattr(self, "build", lambda _: None)(list(variables))
        exchange.accumulate(
            gradients, variables, lambda sums: step(list(zip(sums, variables, strict=True)), *args, **kwargs)
        )
        return cast(Any, self).iterations


def wrap(optimizer: Any, arguments: dict[str, Any]) -> Any:
    """A legacy optimizer that reduces its gradients; the arguments are those of ``DistributedOptimizer``."""
    if reduction_of(None, arguments["op"]) not in (Average, Sum):
        raise ArgumentError(f"op={arguments['op']!r}: a Keras optimizer takes Average or Sum")
    passes = int(arguments["backward_passes_per_step"])
    if passes < 1:
        raise ArgumentError(f"backward_passes_per_step={passes}: expected 1 or more")
    options = ExchangeOptions(
        op=arguments["op"],
        gradient_predivide_factor=arguments["gradient_predivide_factor"],
        compression=for_tensorflow(arguments["compression"]),
        sparse_as_dense=arguments["sparse_as_dense"],
        groups=chosen_groups(arguments["groups"], arguments["num_groups"], lambda variable: variable),
        process_set=arguments["process_set"],
        scale_local_gradients=arguments["scale_local_gradients"],
        label=f"Distributed{type(optimizer).__name__}",
    )
    base = type(optimizer)
    body = {"__module__": base.__module__, "__doc__": base.__doc__}
    config = optimizer.get_config()
    if arguments["name"] is not None:
        config["name"] = arguments["name"]
    wrapped_class = type(base.__name__, (_Legacy, base), body)
    wrapped = wrapped_class.from_config(config)  # type: ignore[attr-defined]
    wrapped.horo_lite = _Exchange(options, passes, bool(arguments["average_aggregated_gradients"]))
    return wrapped
