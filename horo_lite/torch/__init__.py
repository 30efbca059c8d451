"""Data-parallel PyTorch: ``import horo_lite.torch as hvd`` in place of ``import horovod.torch as hvd``."""

from __future__ import annotations

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
from horo_lite.horovod_alias import install_as_horovod
from horo_lite.long_work import long_work, rank0_first
from horo_lite.process_sets import ProcessSet, global_process_set
from horo_lite.torch import elastic
from horo_lite.torch.checkpoint import load_checkpoint, save_checkpoint
from horo_lite.torch.consistency import check_consistency
from horo_lite.torch.data import DistributedSampler, check_shards
from horo_lite.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from horo_lite.torch.mpi_ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
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
    sparse_allreduce_async,
    synchronize,
)
from horo_lite.torch.onebit_adam import OneBitAdam
from horo_lite.torch.optimizer import DistributedOptimizer
from horo_lite.torch.point_to_point import recv, send
from horo_lite.torch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from horo_lite.version import __version__
