"""``DistributedOptimizer`` for Keras 3: gradients are reduced over all ranks before the wrapped optimizer sees them.

The result is an instance of a subclass of the wrapped class that shares all its state. ``apply``, through which every
way of training goes, reduces first, so that clipping, loss scaling, weight decay and averaging of weights act on what
all ranks agree on. With Keras' own accumulation (``gradient_accumulation_steps``) the mean over a window's passes is
reduced, once per update.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import keras

from horo_lite import functions
from horo_lite.compression import Compression
from horo_lite.context import ProcessSet, current, global_process_set
from horo_lite.errors import ArgumentError, ArgumentTypeError
from horo_lite.exchange_options import ExchangeOptions, chosen_groups, reduced_among_local
from horo_lite.functions import Average, Sum, reduction_of
from horo_lite.interfaces import Reduction
from horo_lite.keras.accumulation import Accumulator
from horo_lite.keras.backend import Reducer, bridge
from horo_lite.keras.compressor_states import States, as_arrays, read_folder, write
from horo_lite.keras.cooperation import teach_keras


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a wrapped class exchanges gradients.

    Attributes:
        passes: gradients of so many calls are added up before they are reduced and applied.
        average_passes: divide that sum by their number.
        local_layers: layers whose variables stay local.
    """

    options: ExchangeOptions
    passes: int = 1
    average_passes: bool = False
    local_layers: tuple[Any, ...] = ()


class Exchange:
    """What one wrapped optimizer needs besides its own state."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.local: list[Any] = []
        self._reducer: Reducer | None = None
        self._variables: list[int] = []
        self._accumulator: Accumulator | None = None
        self._present: list[bool] | None = None
        self.awaited: list[Any] | None = None
        """The variables of the gradients that Keras accumulates at present, and that are still to be reduced."""
        self._restored: States = {}
        self.gathered: dict[int, States] = {}
        """By rank, what is to be saved for all ranks; empty where each saves its own."""

    def is_local(self, variable: Any) -> bool:
        """True for variables whose gradients stay on their rank."""
        own = bridge().native(variable)
        layers = [v for layer in self.settings.local_layers for v in layer.trainable_weights]
        return any(bridge().native(known) is own for known in [*self.local, *layers])

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], share: bool) -> list[Any]:
        """Gradients as the wrapped optimizer is to see them."""

        def reduce(places: list[int]) -> list[Any]:
            chosen = [gradients[place] for place in places]
            return self._reducer_for([variables[place] for place in places], chosen, share).reduce(chosen)

        local = [self.is_local(variable) for variable in variables]
        return reduced_among_local(self.settings.options, gradients, local, reduce)

    def _reducer_for(self, variables: list[Any], gradients: list[Any], share: bool) -> Reducer:
        known = [id(bridge().native(variable)) for variable in variables]
        if self._reducer is None or self._reducer.context is not current() or known != self._variables:
            kept = self.states
            self._reducer = bridge().make_reducer(self.settings.options, variables, gradients, share)
            self._variables = known
            for name, state in self._reducer.states.items():
                state.update(kept.get(name, {}))
        return self._reducer

    @property
    def states(self) -> Mapping[str, Mapping[str, Any]]:
        """By parameter's name, what a compressor keeps on this rank."""
        return self._restored if self._reducer is None else self._reducer.states

    @property
    def world(self) -> Any:
        """The ranks that the states are of, also after ``shutdown()``."""
        return current() if self._reducer is None else self._reducer.context

    def restore(self, states: States) -> None:
        """Let the compressor go on with what a saved model's had kept."""
        self._restored = states
        if self._reducer is not None:
            for name, state in self._reducer.states.items():
                state.update(states.get(name, {}))

    def completed(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Dense, and zeros where this rank lacks a gradient that another one has: Keras leaves out what is None.

        Collective at the first call.
        """
        options = self.settings.options
        if self._present is None and options.takes_part:
            own = [gradient is not None for gradient in gradients]
            everyone = functions.allgather_object(own, f"{options.label}.present", options.process_set)
            self._present = [any(ranks) for ranks in zip(*everyone, strict=False)]
        return [
            bridge().dense(gradient) if gradient is not None
            else keras.ops.zeros_like(variable) if present and not self.is_local(variable)
            else None
            for gradient, variable, present in itertools.zip_longest(gradients, variables, self._present or ())
        ]

    def accumulator(self, variables: Sequence[Any]) -> Accumulator:
        """The sums of gradients since the last update."""
        if self._accumulator is None:
            self._accumulator = Accumulator(variables, self.settings.passes, self.settings.average_passes)
        return self._accumulator


class Distributed:
    """What a wrapped class has in front of the class it wraps. ``isinstance(optimizer, Distributed)`` tells."""

    horo_lite_settings: Settings

    @property
    def horo_lite(self) -> Exchange:
        """This optimizer's exchange, made when first asked for."""
        exchange = self.__dict__.get("_horo_lite_exchange")
        if exchange is None:
            exchange = self.__dict__["_horo_lite_exchange"] = Exchange(type(self).horo_lite_settings)
        return cast(Exchange, exchange)

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable stays this rank's own."""
        self.horo_lite.local.append(var)

    def build(self, variables: Sequence[Any]) -> None:
        """As in Keras; also makes room for what is accumulated, outside of what is saved."""
        super().build(variables)  # type: ignore[misc]
        if type(self).horo_lite_settings.passes > 1:
            self.horo_lite.accumulator(variables)

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
        if not gradients:
            super().apply(gradients, trainable_variables)  # type: ignore[misc]
            return
        if trainable_variables is None:
            variables = list(optimizer._trainable_variables)
        else:
            trainable_variables = variables = list(trainable_variables)
        exchange = self.horo_lite
        share = _consumes_at_once(optimizer, variables)
        if optimizer.gradient_accumulation_steps and exchange.settings.passes == 1 and share:
            gradients = exchange.completed(gradients, variables)
            exchange.awaited = [v for v, g in zip(variables, gradients, strict=True) if g is not None]
            try:
                super().apply(gradients, trainable_variables)  # type: ignore[misc]
            finally:
                exchange.awaited = None
            return
        if exchange.settings.passes == 1:
            super().apply(exchange.reduce(gradients, variables, share), trainable_variables)  # type: ignore[misc]
            return
        if not optimizer.built:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(variables)
            optimizer.built = True
        step = super().apply  # type: ignore[misc]
        exchange.accumulator(optimizer._trainable_variables).add(
            gradients, variables,
            lambda sums: step(exchange.reduce(sums, variables, share), trainable_variables),
        )

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        """The first that Keras does with the mean of what it has accumulated: here that is reduced."""
        exchange = self.horo_lite
        if exchange.awaited is not None:
            grads = exchange.reduce(grads, exchange.awaited, share=True)
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
    body = {"horo_lite_settings": settings, "__module__": base.__module__, "__doc__": base.__doc__}
    wrapped_class = type(base.__name__, (Distributed, base), body)
    wrapped: Any = object.__new__(wrapped_class)
    wrapped.__dict__.update(optimizer.__dict__)
    return wrapped


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Reduction = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """The optimizer, with gradients reduced over all ranks before it applies them.

    Args:
        optimizer: a Keras 3 optimizer. Its state is shared with the result.
        name: a new name for it.
        device_dense: accepted for Horovod's sake, as is ``device_sparse``: exchanges are made in host memory.
        compression: what goes on the wire (``hvd.Compression``).
        sparse_as_dense: ``tf.IndexedSlices`` travel as dense gradients.
        gradient_predivide_factor: f: gradients are divided by f before the sum and by N / f after it (Average).
        op: Average or Sum.
        backward_passes_per_step: gradients of so many calls are added up on each rank before they are reduced and
            applied; ``iterations`` counts updates.
        average_aggregated_gradients: divide that sum by their number.
        num_groups: deprecated, see ``groups``.
        groups: a number of groups, or lists of variables that travel as one unit.
        process_set: the ranks that take part; others train by themselves.
        scale_local_gradients: gradients of variables given to ``register_local_var`` are divided by the number of
            ranks, so that they weigh as the averaged ones.
    """
    return _distributed(
        optimizer, name, compression, sparse_as_dense, gradient_predivide_factor, op, backward_passes_per_step,
        average_aggregated_gradients, num_groups, groups, process_set, (), scale_local_gradients,
    )


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Reduction = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """A ``DistributedOptimizer`` that keeps the gradients of some layers on their rank.

    Args:
        local_layers: a layer or a list of them.
    """
    layers = [] if local_layers is None else keras.tree.flatten(local_layers)
    wrong = [layer for layer in layers if not isinstance(layer, keras.layers.Layer)]
    if wrong:
        raise ArgumentTypeError(f"local_layers: expected Keras layers, got {wrong[0]!r}")
    return _distributed(
        optimizer, name, compression, sparse_as_dense, gradient_predivide_factor, op, backward_passes_per_step,
        average_aggregated_gradients, 0, groups, process_set, tuple(layers), scale_local_gradients,
    )


def _distributed(
    optimizer: Any,
    name: str | None,
    compression: Any,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    op: Reduction,
    passes: int,
    average_passes: bool,
    num_groups: int,
    groups: Any,
    process_set: ProcessSet,
    local_layers: tuple[Any, ...],
    scale_local_gradients: bool,
) -> Any:
    if reduction_of(None, op) not in (Average, Sum):
        raise ArgumentError(f"op={op!r}: a Keras optimizer takes Average or Sum")
    if passes < 1:
        raise ArgumentError(f"backward_passes_per_step={passes}: expected 1 or more")
    if _is_legacy(optimizer) and not local_layers:
        from horo_lite.tensorflow import optimizer as tensorflow_optimizer

        return tensorflow_optimizer.DistributedOptimizer(
            optimizer, name, compression=compression, sparse_as_dense=sparse_as_dense,
            backward_passes_per_step=passes, op=op, gradient_predivide_factor=gradient_predivide_factor,
            average_aggregated_gradients=average_passes, num_groups=num_groups, groups=groups,
            process_set=process_set, scale_local_gradients=scale_local_gradients,
        )
    options = ExchangeOptions(
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        compression=bridge().compression(compression),
        sparse_as_dense=sparse_as_dense,
        groups=chosen_groups(groups, num_groups, bridge().native),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        label=f"Distributed{type(optimizer).__name__}",
    )
    wrapped = wrap(optimizer, Settings(options, int(passes), bool(average_passes), local_layers))
    if name is not None:
        wrapped.name = name
    return wrapped


def _is_legacy(optimizer: Any) -> bool:
    """An optimizer of ``tf_keras``: whoever has one has imported that."""
    if "tf_keras" not in sys.modules:
        return False
    from horo_lite.tensorflow import legacy

    return legacy.is_legacy(optimizer)
