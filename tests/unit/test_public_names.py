"""The public names of every front end, one file each in tests/public_names; and those of Horovod's TensorFlow and Keras
modules are among them, with the same arguments (for PyTorch: test_torch_names.py).

A new name is added by ``python tests/unit/test_public_names.py``, which rewrites the files: its diff is what users get.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

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


def words(text):
    return text.split()


COMMON = words("""
init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank
is_homogeneous mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built
cuda_built rocm_built ProcessSet global_process_set add_process_set remove_process_set Average Sum Adasum Min Max
Product Compression allreduce allgather broadcast reducescatter DistributedOptimizer broadcast_global_variables
HorovodInternalError join barrier broadcast_object allgather_object elastic
""")
TENSORFLOW = words("""
grouped_allreduce grouped_allgather grouped_reducescatter alltoall broadcast_ broadcast_variables broadcast_object_fn
size_op rank_op local_rank_op local_size_op process_set_included_op BroadcastGlobalVariablesHook
DistributedGradientTape PartialDistributedGradientTape SyncBatchNormalization
""")
KERAS = words("callbacks load_model PartialDistributedOptimizer broadcast_variables check_consistency data")
CALLBACKS = words("""
BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateScheduleCallback LearningRateWarmupCallback
BestModelCheckpoint EarlyStoppingAgreementCallback ConsistencyCallback
""")
ELASTIC = words("run CommitStateCallback UpdateBatchStateCallback UpdateEpochStateCallback KerasState")


def names(module: ModuleType) -> list[str]:
    """Its ``__all__``, or else what it has without an underscore; submodules come and go with what was imported."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "annotations"}
    return sorted(getattr(module, "__all__", [name for name in own if not isinstance(own[name], ModuleType)]))


def public_names() -> dict[str, list[str]]:
    """Of each module whose framework is installed."""
    here = [module for module, framework in FRONT_ENDS.items() if importlib.util.find_spec(framework) is not None]
    return {module: names(importlib.import_module(module)) for module in here}


def list_file(module: str) -> Path:
    return LISTS / f"{module}.txt"


def test_public_names_are_those_listed():
    found = public_names()
    assert "horo_lite" in found
    assert found == {module: list_file(module).read_text().split() for module in found}


def arguments(function):
    return list(inspect.signature(function).parameters)


def test_tensorflow_has_horovods_names_and_arguments():
    pytest.importorskip("tensorflow")
    import horo_lite.tensorflow as hvd

    assert not [name for name in COMMON + TENSORFLOW if not hasattr(hvd, name)]
    assert hasattr(hvd.elastic, "TensorFlowState") and hasattr(hvd.elastic, "TensorFlowKerasState")
    assert arguments(hvd.allreduce) == [
        "tensor", "average", "device_dense", "device_sparse", "compression", "op", "prescale_factor",
        "postscale_factor", "name", "process_set", "ignore_name_scope",
    ]
    assert arguments(hvd.DistributedOptimizer) == [
        "optimizer", "name", "use_locking", "device_dense", "device_sparse", "compression", "sparse_as_dense",
        "backward_passes_per_step", "op", "gradient_predivide_factor", "average_aggregated_gradients", "num_groups",
        "groups", "process_set", "scale_local_gradients",
    ]
    assert arguments(hvd.DistributedGradientTape) == [
        "gradtape", "device_dense", "device_sparse", "compression", "sparse_as_dense", "op",
        "gradient_predivide_factor", "num_groups", "groups", "process_set", "scale_local_gradients",
    ]


def test_keras_under_both_names_has_them_too():
    pytest.importorskip("tensorflow")
    import horo_lite.keras
    import horo_lite.tensorflow.keras
    import horo_lite.tensorflow.keras.callbacks as callbacks

    for hvd in (horo_lite.keras, horo_lite.tensorflow.keras):
        assert not [name for name in COMMON + KERAS if not hasattr(hvd, name)]
        assert not [name for name in ELASTIC if not hasattr(hvd.elastic, name)]
        assert not [name for name in CALLBACKS if not hasattr(hvd.callbacks, name)]
    assert not [name for name in CALLBACKS if not hasattr(callbacks, name)]
    assert arguments(horo_lite.keras.DistributedOptimizer) == [
        "optimizer", "name", "device_dense", "device_sparse", "compression", "sparse_as_dense",
        "gradient_predivide_factor", "op", "backward_passes_per_step", "average_aggregated_gradients", "num_groups",
        "groups", "process_set", "scale_local_gradients",
    ]


if __name__ == "__main__":
    for front_end, found in public_names().items():
        list_file(front_end).write_text("\n".join(found) + "\n")
