"""Written for horovod.keras: trains, is started again, and goes on from the checkpoint that rank 0 has."""

import os
import sys

import horovod.keras as hvd
import keras
import numpy as np

hvd.init()
checkpoint_format = sys.argv[1] + "/checkpoint-{epoch}.h5"
epochs = int(sys.argv[2])

resume_from_epoch = 0
for try_epoch in range(epochs, 0, -1):
    if hvd.rank() == 0 and os.path.exists(checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break
resume_from_epoch = hvd.broadcast(resume_from_epoch, 0, name="resume_from_epoch")

keras.utils.set_random_seed(0)
numbers = np.random.default_rng(hvd.rank())
x = numbers.random((64, 4), "float32")
y = x.sum(1, keepdims=True)
compression = hvd.Compression.fp16

if resume_from_epoch > 0 and hvd.rank() == 0:
    model = hvd.load_model(checkpoint_format.format(epoch=resume_from_epoch), compression=compression)
else:
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    opt = keras.optimizers.SGD(learning_rate=0.05 * hvd.size(), momentum=0.9)
    opt = hvd.DistributedOptimizer(opt, compression=compression)
    model.compile(loss="mean_squared_error", optimizer=opt)

initial_lr = 0.05 * hvd.size()
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=initial_lr, warmup_epochs=2, verbose=1),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=initial_lr, multiplier=1.0, start_epoch=2, end_epoch=4),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=initial_lr, multiplier=1e-1, start_epoch=4),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(checkpoint_format))

model.fit(
    x, y, batch_size=16, callbacks=callbacks, epochs=epochs, verbose=0, initial_epoch=resume_from_epoch,
    shuffle=False,
)
score = hvd.allreduce(model.evaluate(x, y, verbose=0))

print("resumed", int(resume_from_epoch), "iterations", int(model.optimizer.iterations))
print("score", float(score))
print("weights", *[float(np.abs(weights).sum()) for weights in model.get_weights()])
