"""Training on jax where XLA has one thread for everything, and gradients larger than what it copies at once."""

import os

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # XLA has as many threads as there are cores

import keras  # noqa: E402
import numpy as np  # noqa: E402

import horo_lite.keras as hvd  # noqa: E402

hvd.init()
layers = [keras.layers.Dense(512, use_bias=False, kernel_initializer="identity") for _ in range(4)]
model = keras.Sequential([keras.Input((512,)), *layers])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
x = np.full((8, 512), 0.1 * (hvd.rank() + 1.0), "float32")
model.fit(x, 2 * x, batch_size=2, epochs=3, verbose=0)
weights = model.get_weights()
for mine, others in zip(weights, zip(*hvd.allgather_object(weights), strict=True), strict=True):
    for other in others:
        np.testing.assert_array_equal(mine, other)
assert all(np.ptp(w) > 0 for w in weights) and model.jit_compile
print("trained on cores", len(os.sched_getaffinity(0)))
