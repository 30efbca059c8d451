"""What the exchange adds to a Keras training step, against the bridge that one writes first: pack, all-reduce, unpack.

    python benchmarks/training_step_keras.py [--quick]
    mpirun -np 2 python benchmarks/training_step_keras.py

Eight Dense(1024) layers, 8.4 M parameters, batch 32, TensorFlow backend, the compiled step that ``fit`` runs. All ways
take turns in one run; a step of the same model without any exchange is what each is compared with.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from typing import Any

from support.launch import leave, on_ranks
from support.report import Report, seconds_text
from support.timing import Times, in_turn, medians

ALONE, BARRIER, NAIVE, OURS = "no exchange", "barrier only", "pack, MPI, unpack", "horo_lite"
OF_NAIVE = 10 / 19


def sgd_of(name: str, hvd: Any, comm: Any) -> Any:
    """An optimizer that meets the other ranks in one of the four ways."""
    import keras
    import numpy as np
    import tensorflow as tf

    class Barrier(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            with tf.control_dependencies(grads):
                meet = tf.numpy_function(lambda: comm.Barrier(), [], [])
            with tf.control_dependencies([meet]):
                super().apply(grads, trainable_variables)

    class Naive(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            mean = np.empty(sum(int(np.prod(gradient.shape)) for gradient in grads), np.float32)

            def allreduce(packed: Any) -> Any:
                comm.Allreduce(packed, mean)
                np.divide(mean, comm.Get_size(), out=mean)
                return mean

            packed = tf.concat([tf.reshape(gradient, [-1]) for gradient in grads], 0)
            reduced = tf.ensure_shape(tf.numpy_function(allreduce, [packed], tf.float32), packed.shape)
            parts = tf.split(reduced, [int(np.prod(gradient.shape)) for gradient in grads])
            own = [tf.reshape(part, gradient.shape) for part, gradient in zip(parts, grads, strict=True)]
            super().apply(own, trainable_variables)

    if name == OURS:
        return hvd.DistributedOptimizer(keras.optimizers.SGD(1e-6))
    return {ALONE: keras.optimizers.SGD, BARRIER: Barrier, NAIVE: Naive}[name](1e-6)


def step_of(name: str, hvd: Any, comm: Any) -> Callable[[], Any]:
    """A training step of a fresh model."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((1024,)), *(keras.layers.Dense(1024) for _ in range(8))])
    model.compile(sgd_of(name, hvd, comm), "mse", jit_compile=False)
    batch = tf.random.normal([32, 1024])
    batches = iter(tf.data.Dataset.from_tensors((batch, batch)).repeat())
    model.make_train_function()
    return lambda: float(model.train_function(batches)["loss"])


def overhead(times: Times, name: str) -> float:
    """The median of what a step took beyond the step without exchange of its own round, in seconds."""
    return statistics.median(own - bare for own, bare in zip(times[name], times[ALONE], strict=True))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    options = parser.parse_args()
    on_ranks(2)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import horo_lite.keras as hvd

    hvd.init()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    report = Report("training_step_keras", writes=hvd.rank() == 0)
    steps = {name: step_of(name, hvd, comm) for name in (ALONE, BARRIER, NAIVE, OURS)}
    for step in steps.values():
        for _ in range(2 if options.quick else 14):  # overlap is tried out on these
            step()
    times = in_turn(steps, comm, 5 if options.quick else 41)
    found = medians(times)
    added = {name: overhead(times, name) for name in found}
    report.table(
        f"A Keras training step, {hvd.size()} ranks", ["", "step", "added"],
        [[name, seconds_text(seconds), f"{added[name] * 1e3:+.1f} ms"] for name, seconds in found.items()],
    )
    report.csv([{"way": name, "step_s": seconds, "added_s": added[name]} for name, seconds in found.items()])
    report.target("added to a step, of what the naive bridge adds", added[OURS] / added[NAIVE], at_most=OF_NAIVE)
    status = report.finish()
    hvd.shutdown()
    leave(status)


if __name__ == "__main__":
    main()
