"""Handwritten digits with a TensorFlow training loop of one's own, run by all ranks together."""

import tensorflow as tf
from sklearn.datasets import load_digits

import horo_lite.tensorflow as hvd

BATCH, EPOCHS, TEST = 96, 10, 357

hvd.init()
tf.keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")

model = tf.keras.Sequential([
    tf.keras.layers.Input((64,)),
    tf.keras.layers.Dense(128, activation="relu"),
    tf.keras.layers.Dense(10),
])
optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
optimizer.build(model.trainable_variables)
hvd.broadcast_variables(model.variables + optimizer.variables, root_rank=0)
cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def step(batch_images, batch_labels):
    """One update; the loss before it."""
    with tf.GradientTape() as tape:
        loss = cross_entropy(batch_labels, model(batch_images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


for epoch in range(EPOCHS):
    for start in range(TEST, len(images), BATCH):
        batch = slice(start + hvd.rank(), start + BATCH, hvd.size())
        loss = step(images[batch], labels[batch])
    loss = hvd.allreduce(loss, name="loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1:2}: last loss {loss:.4f}")

scores = model(images[:TEST])
accuracy = (scores.numpy().argmax(1) == labels[:TEST]).mean()
if hvd.rank() == 0:
    print(f"test loss {cross_entropy(labels[:TEST], scores):.5f}, accuracy {accuracy:.4f}")
