"""Written for horovod.tensorflow: a loop of its own, variables broadcast after the first batch."""

import os
import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()

numbers = np.random.default_rng(hvd.rank())
images = numbers.random((256, 16), "float32")
labels = (images[:, :8].mean(1) > images[:, 8:].mean(1)).astype("int64")
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().shuffle(256).batch(32)

model = tf.keras.Sequential([tf.keras.layers.Dense(16, activation="tanh"), tf.keras.layers.Dense(2)])
loss = tf.losses.SparseCategoricalCrossentropy(from_logits=True)
opt = tf.optimizers.Adam(0.01 * hvd.size())
checkpoint = tf.train.Checkpoint(model=model, optimizer=opt)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        loss_value = loss(labels, model(images, training=True))

    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)
    return loss_value


losses = []
for batch, (images, labels) in enumerate(dataset.take(100 // hvd.size())):
    loss_value = training_step(images, labels, batch == 0)
    losses.append(float(hvd.allreduce(loss_value, name="loss")))
    if batch % 10 == 0 and hvd.local_rank() == 0:
        print(f"Step #{batch}\tLoss: {loss_value:.6f}")

if hvd.rank() == 0:
    checkpoint.save(os.path.join(sys.argv[1], "checkpoint"))

print("losses", losses[0], losses[-1])
print("weights", *[float(np.abs(weights).sum()) for weights in model.get_weights()])
