"""The public names of every front end, one file each in tests/public_names; and Horovod's are among them.

A new name is added by ``python tests/unit/test_public_names.py``, which rewrites the files: its diff is what users get.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LISTS = ROOT / "tests" / "public_names"
FRONT_ENDS = {
    "horo_lite": "numpy",
    "horo_lite.torch": "torch",
    "horo_lite.tensorflow": "tensorflow",
    "horo_lite.keras": "keras",
    "horo_lite.keras.callbacks": "keras",
}

HOROVOD = {
    "horo_lite.torch": """
        Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min ProcessSet Product Sum
        add_process_set allgather allgather_async allgather_object allreduce allreduce_ allreduce_async
        allreduce_async_ alltoall alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_
        broadcast_object broadcast_optimizer_state broadcast_parameters ccl_built cross_rank cross_size cuda_built
        ddl_built global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async
        grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter
        grouped_reducescatter_async init is_initialized join local_rank local_size mpi_built mpi_enabled
        mpi_threads_supported nccl_built poll rank reducescatter reducescatter_async remove_process_set rocm_built
        shutdown size sparse_allreduce_async synchronize
        """,
    "horo_lite.tensorflow": """
        Adasum Average Compression DistributedGradientTape DistributedOptimizer HorovodInternalError Max Min
        ProcessSet Product Sum add_process_set allgather allgather_object allreduce alltoall broadcast
        broadcast_object broadcast_variables cross_rank cross_size global_process_set grouped_allgather
        grouped_allreduce grouped_reducescatter init is_homogeneous is_initialized join local_rank local_size
        mpi_threads_supported rank reducescatter remove_process_set shutdown size
        """,
    "horo_lite.keras": """
        Adasum Average Compression DistributedOptimizer Max Min Product Sum allgather allreduce broadcast cross_rank
        cross_size init is_initialized load_model local_rank local_size mpi_threads_supported rank reducescatter
        shutdown size
        """,
    "horo_lite.keras.callbacks": """
        BestModelCheckpoint BroadcastGlobalVariablesCallback LearningRateScheduleCallback LearningRateWarmupCallback
        MetricAverageCallback
        """,
}

_NAMES = """
import importlib, json, sys, types
def names(module):
    own = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "annotations"}
    return getattr(module, "__all__", [name for name, value in own.items() if not isinstance(value, types.ModuleType)])
json.dump({module: sorted(names(importlib.import_module(module))) for module in sys.argv[1:]}, sys.stdout)
"""


def public_names() -> dict[str, list[str]]:
    """What a fresh process finds in each module whose framework is installed."""
    here = [module for module, framework in FRONT_ENDS.items() if importlib.util.find_spec(framework) is not None]
    done = subprocess.run([sys.executable, "-c", _NAMES, *here], cwd=ROOT, capture_output=True, text=True, check=True)
    names: dict[str, list[str]] = json.loads(done.stdout)
    return names


def list_file(module: str) -> Path:
    return LISTS / f"{module}.txt"


def test_public_names_are_those_listed():
    found = public_names()
    assert "horo_lite" in found
    assert found == {module: list_file(module).read_text().split() for module in found}


@pytest.mark.parametrize("module", HOROVOD)
def test_horovods_names_are_among_them(module):
    assert not set(HOROVOD[module].split()) - set(list_file(module).read_text().split())


if __name__ == "__main__":
    for front_end, names in public_names().items():
        list_file(front_end).write_text("\n".join(names) + "\n")
