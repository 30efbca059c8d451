"""What a wrapped optimizer of TensorFlow or Keras needs besides its own state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

from horo_lite.accumulation import Accumulator, Host
from horo_lite.compression import Compression
from horo_lite.context import current
from horo_lite.errors import ArgumentError
from horo_lite.exchange_options import (
    ExchangeOptions,
    ParameterSpec,
    chosen_groups,
    reduced_among_local,
)
from horo_lite.functions import Average, Sum, reduction_of
from horo_lite.interfaces import Reduction
from horo_lite.process_sets import ProcessSet, global_process_set

States = Mapping[str, Mapping[str, Any]]
"""By parameter's name, what a compressor keeps from step to step."""


class Reducer(Protocol):
    """Reduces the gradients of one list of variables, step after step."""

    @property
    def context(self) -> Any:
        """The world it reduces in."""
        ...

    @property
    def states(self) -> Mapping[str, MutableMapping[str, Any]]:
        """By parameter's name, what a compressor keeps from step to step."""
        ...

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """This step's gradients, reduced over all ranks; None where no rank has one."""
        ...


class Backend(Host, Protocol):
    """What a framework does for it."""

    def native(self, variable: Any) -> Any:
        """What a variable is known by: the framework's own behind Keras'."""
        ...

    def compression(self, compression: Any) -> Any:
        """What the engine is given for ``compression``."""
        ...

    def parameters(self, variables: Sequence[Any]) -> list[ParameterSpec]:
        """What the plan knows of variables; names are their paths in the model."""
        ...

    def make_reducer(
        self, options: ExchangeOptions, variables: Sequence[Any], gradients: Sequence[Any], share: bool
    ) -> Reducer:
        """Collective over the process set.

        Args:
            gradients: the first step's.
            share: results may be views of the buckets, valid until the next step.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a wrapped optimizer exchanges gradients.

    Attributes:
        passes: gradients of so many calls are added up before they are reduced and applied.
        average_passes: divide that sum by their number.
        local_layers: layers whose variables stay local.
    """

    options: ExchangeOptions
    passes: int = 1
    average_passes: bool = False
    local_layers: tuple[Any, ...] = ()


def settings_for(
    optimizer: Any,
    backend: Backend,
    *,
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
    local_layers: tuple[Any, ...] = (),
) -> Settings:
    """The keywords of every ``DistributedOptimizer`` here, checked.

    Raises:
        ArgumentError: a value, or two together, make no sense.
    """
    if reduction_of(None, op) not in (Average, Sum):
        raise ArgumentError(f"op={op!r}: a Keras optimizer takes Average or Sum")
    if backward_passes_per_step < 1:
        raise ArgumentError(f"backward_passes_per_step={backward_passes_per_step}: expected 1 or more")
    options = ExchangeOptions(
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        compression=backend.compression(compression),
        sparse_as_dense=sparse_as_dense,
        groups=chosen_groups(groups, num_groups, backend.native),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        label=f"Distributed{type(optimizer).__name__}",
        alike={
            "backward_passes_per_step": backward_passes_per_step,
            "average_aggregated_gradients": average_aggregated_gradients,
        },
    )
    return Settings(options, int(backward_passes_per_step), bool(average_aggregated_gradients), local_layers)


class OptimizerExchange:
    """The exchange of one wrapped optimizer."""

    def __init__(self, settings: Settings, backend: Backend) -> None:
        self.settings = settings
        self.local: list[Any] = []
        """Variables whose gradients stay on their rank, besides those of the settings' layers."""
        self._backend = backend
        self._reducer: Reducer | None = None
        self._variables: list[int] = []
        self._restored: States = {}
        self._accumulator = Accumulator(backend, settings.passes, settings.average_passes)

    def is_local(self, variable: Any) -> bool:
        """True for variables whose gradients stay on their rank."""
        layers = [v for layer in self.settings.local_layers for v in layer.trainable_weights]
        return self._key(variable) in map(self._key, [*self.local, *layers])

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], share: bool = False) -> list[Any]:
        """Gradients as the wrapped optimizer is to see them.

        Args:
            share: it keeps none of them beyond its step, so they may be the bucket's own memory.
        """

        def reduce(places: list[int]) -> list[Any]:
            chosen = [gradients[place] for place in places]
            return self._reducer_for([variables[place] for place in places], chosen, share).reduce(chosen)

        local = [self.is_local(variable) for variable in variables]
        return reduced_among_local(self.settings.options, gradients, local, reduce)

    def accumulate(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        apply: Callable[[list[Any]], None],
        assigned: Sequence[Any] = (),
    ) -> None:
        """Add up the gradients of one pass; where that completes a window, ``apply`` the sums.

        Args:
            assigned: all variables to which ``apply`` may assign.
        """
        keys = [self._key(variable) for variable in variables]
        self._accumulator.add(gradients, keys, self._backend.parameters(variables), apply, assigned)

    def _key(self, variable: Any) -> int:
        return id(self._backend.native(variable))

    def _reducer_for(self, variables: list[Any], gradients: list[Any], share: bool) -> Reducer:
        known = [self._key(variable) for variable in variables]
        if self._reducer is None or self._reducer.context is not current() or known != self._variables:
            kept = self.states
            self._reducer = self._backend.make_reducer(self.settings.options, variables, gradients, share)
            self._variables = known
            self._update(self._reducer, kept)
        return self._reducer

    @property
    def states(self) -> States:
        """What a compressor keeps on this rank."""
        return self._restored if self._reducer is None else self._reducer.states

    @property
    def world(self) -> Any:
        """The ranks that the states are of, also after ``shutdown()``."""
        return current() if self._reducer is None else self._reducer.context

    def restore(self, states: States) -> None:
        """Let the compressor go on with what a saved model's had kept."""
        self._restored = states
        if self._reducer is not None:
            self._update(self._reducer, states)

    def _update(self, reducer: Reducer, states: States) -> None:
        for name, state in reducer.states.items():
            state.update(states.get(name, {}))
