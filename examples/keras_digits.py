"""Handwritten digits with Keras 3 and model.fit, trained by one process."""

import keras
from sklearn.datasets import load_digits

BATCH, EPOCHS, TEST = 96, 10, 357

keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
train_images, train_labels = images[TEST:], labels[TEST:]

model = keras.Sequential([
    keras.layers.Input((64,)),
    keras.layers.Dense(128, activation="relu"),
    keras.layers.Dense(10),
])
optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, metrics=["accuracy"])

callbacks = []
verbose = 2
batch = BATCH
model.fit(train_images, train_labels, batch, EPOCHS, verbose, callbacks, shuffle=False)

test_loss, accuracy = model.evaluate(images[:TEST], labels[:TEST], batch_size=TEST, verbose=0)
print(f"test loss {test_loss:.5f}, accuracy {accuracy:.4f}")
