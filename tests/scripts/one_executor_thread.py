"""Training where TensorFlow has one thread for everything, and several buckets are on their way at once."""

import numpy as np
import tensorflow as tf

import horo_lite.keras
import horo_lite.tensorflow as hvd

tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)
hvd.init()


def network():
    layers = [tf.keras.layers.Dense(32, use_bias=False, kernel_initializer="identity") for _ in range(6)]
    return tf.keras.Sequential([tf.keras.Input((32,)), *layers])


x = tf.fill([8, 32], 0.1 * (hvd.rank() + 1.0))

model = network()
model.compile(horo_lite.keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.01)), "mse")
model.fit(x, 2 * x, batch_size=2, epochs=2, verbose=0)

first, second = network(), network()


@tf.function
def step():
    """Exchanges that do not depend on one another, so that an executor might run them in any order."""
    weights = [first.trainable_variables, second.trainable_variables]
    with tf.GradientTape(persistent=True) as tape:
        losses = [tf.reduce_mean((model(x) - 2 * x) ** 2) for model in (first, second)]
    for loss, variables in zip(losses, weights, strict=True):
        distributed = hvd.DistributedGradientTape(tape)
        for variable, gradient in zip(variables, distributed.gradient(loss, variables), strict=True):
            variable.assign_sub(0.01 * gradient)
    return [hvd.allreduce(loss) for loss in losses]


for _ in range(5):
    losses = step()
weights = [np.asarray(w) for m in (model, first, second) for w in m.get_weights()]
for mine, others in zip(weights, zip(*hvd.allgather_object(weights), strict=True), strict=True):
    for other in others:
        np.testing.assert_array_equal(mine, other)
assert all(np.ptp(w) > 0 for w in weights) and float(losses[0]) == float(losses[1])
print("threads", tf.config.threading.get_inter_op_parallelism_threads())
