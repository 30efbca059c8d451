"""Horovod's API for Keras 3: ``import horo_lite.keras as hvd`` (the same as ``horo_lite.tensorflow.keras``).

Works on Keras' TensorFlow and torch backends; only the active one is imported.
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
    allgather_object,
    barrier,
    broadcast_object,
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
from horo_lite.compression import Compression
from horo_lite.keras import callbacks, data
from horo_lite.keras.broadcasting import broadcast_variables
from horo_lite.keras.callbacks.agreement import check_consistency
from horo_lite.keras.eager import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)
from horo_lite.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from horo_lite.keras.saving import load_model, save_model


def __getattr__(name: str) -> typing.Any:
    if name != "elastic":  # imported when asked for: few scripts do
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.elastic")
