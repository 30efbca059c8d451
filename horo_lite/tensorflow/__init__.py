"""Horovod's API for TensorFlow 2.16 and newer, eager and in graphs: ``import horo_lite.tensorflow as hvd``.

First stage of the data path: what a gradient looks like here, and nothing else. ``bridge`` takes tensors to the engine
and back; Keras models are better served by ``horo_lite.keras``, which this module's ``keras`` re-exports.
"""

from __future__ import annotations

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
    mpi_threads_supported,
    rank,
    remove_process_set,
    shutdown,
    size,
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
