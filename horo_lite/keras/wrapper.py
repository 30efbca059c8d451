"""Keras 3 optimizers that reduce gradients over all ranks before they see them.

The result is an instance of a subclass of the wrapped class that shares all its state. ``apply``, through which every
way of training goes, reduces first, so that clipping, loss scaling, weight decay and averaging of weights act on what
all ranks agree on. With Keras' own accumulation (``gradient_accumulation_steps``) the mean over a window's passes is
reduced, once per update.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import keras

from horo_lite import functions
from horo_lite.errors import ArgumentError, ArgumentTypeError
from horo_lite.keras.backend import bridge
from horo_lite.keras.compressor_states import States, as_arrays, read_folder, write
from horo_lite.keras.cooperation import teach_keras
from horo_lite.optimizer_exchange import OptimizerExchange, Settings


class KerasExchange(OptimizerExchange):
    """The exchange of one wrapped Keras 3 optimizer."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, bridge())
        self._present: list[bool] | None = None
        self.awaited: list[Any] | None = None
        """The variables of the gradients that Keras accumulates at present, and that are still to be reduced."""
        self.gathered: dict[int, States] = {}
        """By rank, what is to be saved for all ranks; empty where each saves its own."""

    def completed(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Dense, and zeros where this rank lacks a gradient that another one has: Keras leaves out what is None.

        Collective at the first call.
        """
        options = self.settings.options
        if self._present is None and options.takes_part:
            own = [gradient is not None for gradient in gradients]
            everyone = functions.allgather_object(own, f"{options.label}.present", options.process_set)
            self._present = [any(ranks) for ranks in zip(*everyone, strict=False)]
        parameters = bridge().parameters(variables)
        return [
            bridge().dense(gradient, type_name) if gradient is not None
            else keras.ops.zeros(shape, type_name) if present and not self.is_local(variable)
            else None
            for gradient, variable, (_, shape, type_name), present in itertools.zip_longest(
                gradients, variables, parameters, self._present or ()
            )
        ]


class Distributed:
    """What a wrapped class has in front of the class it wraps. ``isinstance(optimizer, Distributed)`` tells."""

    horo_lite_settings: Settings

    @property
    def horo_lite(self) -> KerasExchange:
        """This optimizer's exchange, made when first asked for."""
        exchange = self.__dict__.get("_horo_lite_exchange")
        if exchange is None:
            exchange = self.__dict__["_horo_lite_exchange"] = KerasExchange(type(self).horo_lite_settings)
        return cast(KerasExchange, exchange)

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable stays this rank's own."""
        self.horo_lite.local.append(var)

    def save_assets(self, inner_path: str) -> None:
        """Beside the weights of a saved model: what a compressor keeps."""
        exchange = self.horo_lite
        states = as_arrays(exchange.states)
        if states or exchange.gathered:
            write(Path(inner_path), exchange.gathered or {exchange.world.rank: states}, exchange.world.size)

    def load_assets(self, inner_path: str) -> None:
        """Its mate, for a model that is compiled already."""
        self.horo_lite.restore(read_folder(Path(inner_path)))

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce the gradients over all ranks, then do as Keras does."""
        optimizer = cast(Any, self)
        gradients = list(grads)
        step = super().apply  # type: ignore[misc]
        if not gradients:
            step(gradients, trainable_variables)
            return
        if trainable_variables is None:
            variables = list(optimizer._trainable_variables)
        else:
            trainable_variables = variables = list(trainable_variables)
        exchange = self.horo_lite
        share = _consumes_at_once(optimizer, variables)
        if exchange.settings.passes > 1:
            if not optimizer.built:
                with keras.name_scope(optimizer.name, caller=optimizer):
                    optimizer.build(variables)
                optimizer.built = True
            exchange.accumulate(
                gradients, variables,
                lambda sums: step(exchange.reduce(sums, variables, share), trainable_variables),
                assigned=[*optimizer._trainable_variables, *optimizer.variables],
            )
        elif optimizer.gradient_accumulation_steps and share:
            gradients = exchange.completed(gradients, variables)
            exchange.awaited = [v for v, g in zip(variables, gradients, strict=True) if g is not None]
            try:
                step(gradients, trainable_variables)
            finally:
                exchange.awaited = None
        else:
            step(exchange.reduce(gradients, variables, share), trainable_variables)

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> Any:
        """As ``apply``, through which Keras goes except in ``LossScaleOptimizer``, which must see reduced gradients."""
        step = super().stateless_apply  # type: ignore[misc]
        if not isinstance(self, keras.optimizers.LossScaleOptimizer):
            return step(optimizer_variables, grads, trainable_variables)
        exchange = self.horo_lite
        variables = list(self._trainable_variables)
        own = [*variables, *self.variables]
        values = [*trainable_variables, *optimizer_variables]

        def apply(gradients: Sequence[Any]) -> None:
            reduced = exchange.reduce(gradients, variables, share=True)
            after = step([v.value for v in self.variables], reduced, [v.value for v in variables])
            for variable, value in zip(own, keras.tree.flatten(after), strict=True):
                variable.assign(value)

        with keras.StatelessScope(list(zip(own, values, strict=True))) as scope:
            if exchange.settings.passes > 1:
                exchange.accumulate(grads, variables, apply, assigned=own)
            else:
                apply(grads)
        results = [scope.get_current_value(variable) for variable in own]
        return results[: len(variables)], results[len(variables) :]

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        """The first that Keras does with the mean of what it has accumulated: here that is reduced."""
        exchange = self.horo_lite
        awaited = exchange.awaited
        if awaited is not None:
            mean = list(grads)
            grads = bridge().in_update(self, lambda: exchange.reduce(mean, awaited, share=True), mean)
        return super()._clip_gradients(grads)  # type: ignore[misc]


def _consumes_at_once(optimizer: Any, variables: Sequence[Any]) -> bool:
    """True where ``apply`` keeps no gradient beyond its end, so that it may be given the bucket's own memory.

    Keras' optimizers compute with gradients; another's might assign one to a variable of its own.
    """
    wrapped = type(optimizer).__mro__[2]
    return wrapped.__module__.startswith("keras.") and not any(
        getattr(variable, "overwrite_with_gradient", False) for variable in variables
    )


def wrap(optimizer: Any, settings: Settings) -> Any:
    """An instance of a subclass of the optimizer's class that shares its state.

    Raises:
        ArgumentTypeError: not a Keras 3 optimizer.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ArgumentTypeError(
            f"expected a Keras {keras.__version__} optimizer, got {type(optimizer).__module__}."
            f"{type(optimizer).__name__}: pass an instance such as keras.optimizers.SGD(0.1)"
        )
    if isinstance(optimizer, Distributed):
        raise ArgumentError(
            "the optimizer is a DistributedOptimizer already: wrapped twice, its gradients would be reduced twice"
        )
    teach_keras()
    base = type(optimizer)
    body = {
        "horo_lite_settings": settings, "__module__": base.__module__, "__doc__": base.__doc__,
        "apply": bridge().uncompiled(Distributed.apply),
    }
    wrapped_class = type(base.__name__, (Distributed, base), body)
    wrapped: Any = object.__new__(wrapped_class)
    wrapped.__dict__.update(optimizer.__dict__)
    return wrapped
