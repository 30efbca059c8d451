"""Horovod's API for Keras 3: ``import horo_lite.keras as hvd`` (the same as ``horo_lite.tensorflow.keras``).

Works on Keras' TensorFlow and torch backends; only the active one is imported.
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
from horo_lite.compression import Compression
from horo_lite.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
