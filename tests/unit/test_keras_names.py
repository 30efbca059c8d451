"""Every public name that a script written for Horovod's TensorFlow and Keras modules may use, and its arguments."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("tensorflow")


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


def arguments(function):
    return list(inspect.signature(function).parameters)


def test_tensorflow():
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


def test_keras_under_both_names():
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


def test_names_of_parameters_do_not_depend_on_what_was_built_before():
    from horo_lite.exchange_options import stable_names

    first = ["model/dense/kernel", "model/dense/bias", "model/dense_1/kernel"]
    later = ["dense_7/kernel", "dense_7/bias", "dense_9/kernel"]
    assert stable_names(first) == stable_names(later) == ["dense/kernel", "dense/bias", "dense_1/kernel"]
    assert stable_names(["w", "w", "v:0"]) == ["w", "w#2", "v"]


def test_names_of_parameters_in_another_order_differ():
    from horo_lite.exchange_options import stable_names

    for paths in (["dense/kernel", "dense_1/kernel"], ["dense_7/kernel", "dense_9/kernel"], ["left/w", "right/w"]):
        assert stable_names(paths) != stable_names(paths[::-1])
    assert stable_names(["dense_9/kernel", "dense_10/kernel"]) == ["dense/kernel", "dense_1/kernel"]
