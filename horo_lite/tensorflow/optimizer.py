"""``DistributedOptimizer`` as TensorFlow scripts call it: with Horovod's order of arguments, on Keras' optimizers."""

from __future__ import annotations

from typing import Any

from horo_lite.functions import Average
from horo_lite.interfaces import Reduction
from horo_lite.process_sets import ProcessSet, global_process_set
from horo_lite.tensorflow.compression import Compression


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Reduction = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """The optimizer, with gradients reduced over all ranks. See ``horo_lite.keras.DistributedOptimizer``.

    Args:
        optimizer: an optimizer of Keras 3, or of legacy Keras (``tf_keras``).
        use_locking: accepted for Horovod's sake.
    """
    from horo_lite.tensorflow import legacy

    keywords = {
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "average_aggregated_gradients": average_aggregated_gradients,
        "num_groups": num_groups,
        "groups": groups,
        "process_set": process_set,
        "scale_local_gradients": scale_local_gradients,
    }
    if legacy.is_legacy(optimizer):
        return legacy.wrap(optimizer, name, keywords)
    from horo_lite.keras.optimizer import DistributedOptimizer as for_keras

    return for_keras(optimizer, name, **keywords)
