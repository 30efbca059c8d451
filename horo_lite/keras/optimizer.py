"""``DistributedOptimizer`` and ``PartialDistributedOptimizer`` for Keras: Horovod's names and arguments."""

from __future__ import annotations

import sys
from typing import Any

import keras

from horo_lite.compression import Compression
from horo_lite.errors import ArgumentTypeError
from horo_lite.functions import Average
from horo_lite.interfaces import Reduction
from horo_lite.keras.backend import bridge
from horo_lite.keras.wrapper import wrap
from horo_lite.optimizer_exchange import settings_for
from horo_lite.process_sets import ProcessSet, global_process_set


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
        optimizer, name, compression=compression, sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor, op=op, backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients, num_groups=num_groups, groups=groups,
        process_set=process_set, scale_local_gradients=scale_local_gradients,
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
        optimizer, name, compression=compression, sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor, op=op, backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients, groups=groups,
        process_set=process_set, scale_local_gradients=scale_local_gradients, local_layers=tuple(layers),
    )


def _distributed(optimizer: Any, name: str | None, **keywords: Any) -> Any:
    if "tf_keras" in sys.modules:  # whoever has an optimizer of that has imported it
        from horo_lite.tensorflow import legacy

        if legacy.is_legacy(optimizer):
            return legacy.wrap(optimizer, name, keywords)
    wrapped = wrap(optimizer, settings_for(optimizer, bridge(), **keywords))
    if name is not None:
        wrapped.name = name
    return wrapped
