"""Gradient tapes whose gradients are reduced over all ranks."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horo_lite.context import current
from horo_lite.exchange_options import (
    ExchangeOptions,
    ParameterSpec,
    chosen_groups,
    reduced_among_local,
    stable_names,
    variable_path,
)
from horo_lite.functions import Average
from horo_lite.interfaces import Reduction
from horo_lite.process_sets import ProcessSet, global_process_set
from horo_lite.tensorflow.bridge import do_not_convert
from horo_lite.tensorflow.compression import Compression, for_tensorflow
from horo_lite.tensorflow.gradients import GradientReducer
from horo_lite.tensorflow.variables import unwrapped

_MAX_REDUCERS = 256
_reducers: collections.OrderedDict[Any, GradientReducer] = collections.OrderedDict()


class _DistributedTape:
    """A ``tf.GradientTape`` in all but ``gradient``, which reduces what the wrapped tape computes.

    A tape lives for one step, its buckets for all: they are found again by the sources and the options.
    """

    def __init__(self, tape: tf.GradientTape, options: ExchangeOptions) -> None:
        self._tape = tape
        self._options = options
        self._local_sources: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_tape"], name)

    def __enter__(self) -> Any:
        self._tape.__enter__()
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        self._tape.__exit__(kind, value, traceback)

    def register_local_source(self, source: Any) -> None:
        """The gradient of this variable stays this rank's own."""
        self._local_sources.add(id(unwrapped(source)))

    @do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        *,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """The gradients of ``target``, reduced over all ranks.

        Args:
            target: as for ``tf.GradientTape``.
            sources: a variable or tensor, or a structure of them.
            output_gradients: as for ``tf.GradientTape``.
            use_generic_names: accepted for Horovod's sake.
            unconnected_gradients: what is given for sources that ``target`` does not depend on. None stays None
                where it is None on all ranks; elsewhere it counts as zero.
        """
        gradients = self._tape.gradient(target, sources, output_gradients, unconnected_gradients)
        flat_sources = tf.nest.flatten(sources)
        flat = [gradients] if len(flat_sources) == 1 and gradients is None else _flatten(gradients)
        reduced = self._reduce(flat_sources, flat)
        return tf.nest.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(
        self, gradients: Sequence[Any], sources: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Split gradients by their sources: those that stay local (None elsewhere), and those that are reduced."""
        local = [g if self._is_local(s) else None for g, s in zip(gradients, sources, strict=True)]
        shared = [None if self._is_local(s) else g for g, s in zip(gradients, sources, strict=True)]
        return local, shared

    def _is_local(self, source: Any) -> bool:
        return id(unwrapped(source)) in self._local_sources

    def _reduce(self, sources: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        def reduce(places: list[int]) -> list[Any]:
            chosen = [gradients[place] for place in places]
            return reducer_for(self._options, [sources[place] for place in places], chosen).reduce(chosen)

        return reduced_among_local(self._options, gradients, [self._is_local(source) for source in sources], reduce)


def _flatten(gradients: Any) -> list[Any]:
    """The gradients one by one; ``tf.IndexedSlices`` are leaves here."""
    return list(tf.nest.flatten(gradients, expand_composites=False))


def reducer_for(options: ExchangeOptions, sources: Sequence[Any], gradients: Sequence[Any]) -> GradientReducer:
    """The reducer for these sources: made at the first step, the same afterwards."""
    variables = [unwrapped(source) for source in sources]
    parameters = parameter_specs(sources)
    key = (options, tuple(parameters))
    reducer = _reducers.get(key)
    if reducer is None or reducer.context is not current():
        reducer = GradientReducer(options, parameters, variables, gradients)
        _reducers[key] = reducer
        if len(_reducers) > _MAX_REDUCERS:
            _reducers.popitem(last=False)[1].close()
    _reducers.move_to_end(key)
    return reducer


def parameter_specs(variables: Sequence[Any]) -> list[ParameterSpec]:
    """What the plan knows of variables or tensors; names from Keras' paths where there are any."""
    names = stable_names([_path(variable) for variable in variables])
    return [
        (name, tuple(variable.shape), tf.as_dtype(variable.dtype).name)
        for name, variable in zip(names, variables, strict=True)
    ]


def _path(variable: Any) -> str:
    named = isinstance(variable, tf.Variable) or hasattr(variable, "path")
    return variable_path(variable) if named else "tensor"


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Reduction = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A tape whose ``gradient`` returns gradients reduced over all ranks.

    Args:
        gradtape: the tape that records.
        compression: what goes on the wire (``hvd.Compression``).
        sparse_as_dense: ``tf.IndexedSlices`` travel as dense gradients.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: f: gradients are divided by f before the sum and by N / f after it (Average).
        num_groups: deprecated, see ``groups``.
        groups: a number of groups, or lists of variables that travel as one unit.
        process_set: the ranks that take part; on others the gradients stay local.
        scale_local_gradients: gradients of sources given to ``register_local_source`` are divided by the number of
            ranks.
    """
    options = ExchangeOptions(
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        compression=for_tensorflow(compression),
        sparse_as_dense=sparse_as_dense,
        groups=chosen_groups(groups, num_groups, unwrapped),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        label="DistributedGradientTape",
    )
    return _DistributedTape(gradtape, options)


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Reduction = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """A ``DistributedGradientTape`` that keeps the gradients of some layers on their rank.

    Args:
        local_layers: a Keras layer, or a list of them; they must be built.
    """
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor,
        num_groups, groups, process_set, scale_local_gradients,
    )
    for layer in tf.nest.flatten(local_layers) if local_layers is not None else []:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape
