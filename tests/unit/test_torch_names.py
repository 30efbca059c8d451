"""The torch front end has Horovod's names with Horovod's signatures; the alias makes them importable as Horovod's."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

pytest.importorskip("torch")

hvd = pytest.importorskip("horo_lite.torch")

def names(text):
    return text.split()


HOROVOD = names("""
elastic Compression allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters
allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce grouped_allreduce_async grouped_allreduce_
grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async grouped_allgather grouped_allgather_async
broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async reducescatter reducescatter_async
grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize init shutdown is_initialized
start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank mpi_threads_supported mpi_enabled
mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built ProcessSet global_process_set
add_process_set remove_process_set Average Sum Adasum Min Max Product HorovodInternalError DistributedOptimizer
SyncBatchNorm
""")

OURS = names("""
is_homogeneous get_process_set_ids_and_ranks convert_sync_batchnorm save_checkpoint load_checkpoint check_consistency
check_shards DistributedSampler rank0_first long_work wire_stats install_as_horovod send recv HoroLiteError
DisagreementError HostsUpdatedInterrupt
""")

REDUCE = "average=None name=None op=None prescale_factor=1.0 postscale_factor=1.0 process_set"
COMPRESSED = REDUCE.replace("op=None", "compression op=None")
SCATTER = "name=None op process_set prescale_factor=1.0 postscale_factor=1.0"
SIGNATURES = {
    "allreduce": f"tensor {COMPRESSED}",
    "allreduce_async": f"tensor {REDUCE}",
    "allreduce_": f"tensor {REDUCE}",
    "allreduce_async_": f"tensor {REDUCE}",
    "grouped_allreduce": f"tensors {COMPRESSED}",
    "grouped_allreduce_async": f"tensors {REDUCE}",
    "grouped_allreduce_": f"tensors {REDUCE}",
    "grouped_allreduce_async_": f"tensors {REDUCE}",
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name=None process_set",
    "allgather_async": "tensor name=None process_set",
    "grouped_allgather": "tensors name=None process_set",
    "grouped_allgather_async": "tensors name=None process_set",
    "broadcast": "tensor root_rank name=None process_set",
    "broadcast_async": "tensor root_rank name=None process_set",
    "broadcast_": "tensor root_rank name=None process_set",
    "broadcast_async_": "tensor root_rank name=None process_set",
    "alltoall": "tensor splits=None name=None process_set",
    "alltoall_async": "tensor splits=None name=None process_set",
    "reducescatter": f"tensor {SCATTER}".replace("op", "compression op"),
    "reducescatter_async": f"tensor {SCATTER}",
    "grouped_reducescatter": f"tensors {SCATTER}".replace("op", "compression op"),
    "grouped_reducescatter_async": f"tensors {SCATTER}",
    "join": "device=-1",
    "barrier": "process_set",
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params root_rank process_set",
    "broadcast_optimizer_state": "optimizer root_rank model=None process_set",
    "broadcast_object": "obj root_rank=0 name=None process_set",
    "allgather_object": "obj name=None process_set",
    "init": "comm=None process_sets=None",
    "start_timeline": "file_path mark_cycles=False",
    "DistributedOptimizer": (
        "optimizer named_parameters=None compression backward_passes_per_step=1 op gradient_predivide_factor=1.0 "
        "num_groups=0 groups=None sparse_as_dense=False process_set average_over_passes=False clip_norm=None "
        "bucket_bytes=None overlap=auto"
    ),
    "SyncBatchNorm": (
        "num_features eps=1e-05 momentum=0.1 affine=True track_running_stats=True process_set device=None dtype=None"
    ),
}
OTHER_DEFAULTS = {"process_set": "global_process_set", "compression": "none", "op": "Average"}


@pytest.mark.parametrize("name", [*HOROVOD, *OURS])
def test_the_name_is_there(name):
    assert hasattr(hvd, name)


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature_is_horovods(name):
    shown = []
    for parameter in inspect.signature(getattr(hvd, name)).parameters.values():
        default = parameter.default
        if default is inspect.Parameter.empty:
            shown.append(parameter.name)
        elif default is hvd.global_process_set or default is hvd.Compression.none or isinstance(default, type(hvd.Sum)):
            assert default is not hvd.Sum
            shown.append(parameter.name)
        else:
            shown.append(f"{parameter.name}={default}")
    assert " ".join(shown) == SIGNATURES[name]


def test_new_arguments_are_keyword_only():
    parameters = inspect.signature(hvd.DistributedOptimizer).parameters
    new = [p.name for p in parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert new == ["average_over_passes", "clip_norm", "bucket_bytes", "overlap"]


def test_what_it_was_built_with():
    assert (hvd.mpi_built(), hvd.gloo_built(), hvd.nccl_built(), hvd.cuda_built()) == (True, False, 0, False)
    assert (hvd.ddl_built(), hvd.ccl_built(), hvd.rocm_built()) == (False, False, False)


SCRIPT = """
import sys
import horo_lite
horo_lite.install_as_horovod()
horo_lite.install_as_horovod()
assert "torch" not in sys.modules and "tensorflow" not in sys.modules
import horovod
import horovod.torch as hvd
from horovod.torch.mpi_ops import allreduce, rank, size, Average
from horovod.common.util import gloo_built, split_list
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.process_sets import ProcessSet
import horovod.torch.elastic
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.compression import Compression
from horovod.torch.functions import broadcast_object
import horovod.runner
import horo_lite.torch
assert hvd is horo_lite.torch and hvd.__name__ == "horo_lite.torch" and horovod.torch is hvd
assert allreduce is hvd.allreduce and issubclass(HorovodInternalError, RuntimeError)
assert split_list([1, 2, 3], 2) == [[1, 2], [3]] and horovod.__version__
assert "tensorflow" not in sys.modules
try:
    import horovod.nothing
except ModuleNotFoundError:
    print("fine")
"""


def test_scripts_written_for_horovod_find_their_imports():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.stdout == "fine\n", done.stderr
