"""Data-parallel training on MPI with Horovod's API, without a compiler.

``import horo_lite as hvd`` is the framework-free front end: collectives on numpy arrays. ``horo_lite.torch``,
``horo_lite.tensorflow`` and ``horo_lite.keras`` add what their framework needs. Importing starts nothing; ``init()``
initialises MPI.
"""

from __future__ import annotations

from horo_lite.context import (
    add_process_set,
    cross_rank,
    cross_size,
    get_process_set_ids_and_ranks,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_threads_supported,
    rank,
    remove_process_set,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    wire_stats,
)
from horo_lite.errors import (
    DisagreementError,
    HoroLiteError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    LaunchError,
    MPIMissingError,
    NotInitializedError,
    PeerLostError,
)
from horo_lite.function_run import run
from horo_lite.functions import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allgather_object,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    synchronize,
)
from horo_lite.horovod_alias import install_as_horovod
from horo_lite.long_work import long_work, rank0_first
from horo_lite.process_sets import ProcessSet, global_process_set
from horo_lite.version import __version__
