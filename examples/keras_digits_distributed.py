"""Handwritten digits with Keras 3 and model.fit, trained by all ranks together."""

import keras
from sklearn.datasets import load_digits

import horo_lite.keras as hvd

BATCH, EPOCHS, TEST = 96, 10, 357

hvd.init()
keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
train_images, train_labels = (part[TEST:][hvd.rank() :: hvd.size()] for part in (images, labels))

model = keras.Sequential([
    keras.layers.Input((64,)),
    keras.layers.Dense(128, activation="relu"),
    keras.layers.Dense(10),
])
optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, metrics=["accuracy"])

callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
verbose = 2 if hvd.rank() == 0 else 0
batch = BATCH // hvd.size()
model.fit(train_images, train_labels, batch, EPOCHS, verbose, callbacks, shuffle=False)

test_loss, accuracy = model.evaluate(images[:TEST], labels[:TEST], batch_size=TEST, verbose=0)
if hvd.rank() == 0:
    print(f"test loss {test_loss:.5f}, accuracy {accuracy:.4f}")
