"""Horovod's API for TensorFlow 2.16 and newer, eager and in graphs: ``import horo_lite.tensorflow as hvd``.

First stage of the data path: what a gradient looks like here, and nothing else. ``bridge`` takes tensors to the engine
and back; Keras models are better served by ``horo_lite.keras``, which this module's ``keras`` re-exports.
"""

from __future__ import annotations

import importlib
import typing

from horo_lite import (
    Adasum,
    Average,
    DisagreementError,
    HoroLiteError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    LaunchError,
    Max,
    Min,
    MPIMissingError,
    NotInitializedError,
    PeerLostError,
    ProcessSet,
    Product,
    Sum,
    __version__,
    add_process_set,
    barrier,
    cross_rank,
    cross_size,
    get_process_set_ids_and_ranks,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    long_work,
    mpi_threads_supported,
    rank,
    rank0_first,
    remove_process_set,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    wire_stats,
)
from horo_lite.built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    nccl_built,
    rocm_built,
)
from horo_lite.tensorflow.collectives import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from horo_lite.tensorflow.compression import Compression
from horo_lite.tensorflow.optimizer import DistributedOptimizer
from horo_lite.tensorflow.process import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from horo_lite.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from horo_lite.tensorflow.variables import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)

# Imported when asked for: the first needs Keras, the others are rarely used.
_LATE = {"SyncBatchNormalization": "sync_batch_norm", "elastic": "elastic", "keras": "keras"}


def __getattr__(name: str) -> typing.Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_LATE[name]}")
    return getattr(module, name, module)
