"""Handwritten digits with PyTorch, a script as people have written them for Horovod; it runs unchanged.

    horo-lite run -np 2 --horovod examples/torch_horovod_digits.py --checkpoint-format /tmp/digits-{epoch}.pt

A second run goes on after the last checkpoint it finds.
"""

import argparse
import os

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", default="digits-{epoch}.pt")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--batches-per-allreduce", type=int, default=1)
parser.add_argument("--base-lr", type=float, default=0.02, help="of one rank")
parser.add_argument("--warmup-epochs", type=float, default=2)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
args = parser.parse_args()

hvd.init()
torch.manual_seed(hvd.rank())  # weights that differ; rank 0's are broadcast
verbose = hvd.rank() == 0

images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
images = (images / 16).float().reshape(-1, 1, 8, 8)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train_set, test_set = (TensorDataset(images[part], labels[part]) for part in (order[357:], order[:357]))
train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
train_loader = DataLoader(train_set, args.batch_size * args.batches_per_allreduce, sampler=train_sampler)
test_loader = DataLoader(test_set, 64, sampler=test_sampler)

resume_from_epoch = 0
for epoch in range(args.epochs, 0, -1):
    if os.path.exists(args.checkpoint_format.format(epoch=epoch)):
        resume_from_epoch = epoch
        break
resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
    nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10),
)
# Adasum needs no larger learning rate on more ranks, an average does.
lr_scaler = args.batches_per_allreduce * (1 if args.use_adasum else hvd.size())
optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr * lr_scaler, momentum=0.9, weight_decay=5e-5)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    backward_passes_per_step=args.batches_per_allreduce,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)
if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch), weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


class Metric:
    """A mean over batches and ranks."""

    def __init__(self, name):
        self.name, self.total, self.count = name, torch.tensor(0.0), 0

    def update(self, value):
        self.total += hvd.allreduce(value.detach(), name=self.name)
        self.count += 1

    @property
    def mean(self):
        return self.total.item() / self.count


def accuracy(scores, target):
    return (scores.argmax(1) == target).float().mean()


def adjust_learning_rate(epoch, batch_idx):
    """From one rank's rate to all ranks' over the first epochs (Goyal et al. 2017); a tenth after 8."""
    factor = 1.0 if epoch < 8 else 0.1
    if epoch < args.warmup_epochs:
        progress = (epoch + (batch_idx + 1) / len(train_loader)) / args.warmup_epochs
        factor = (progress * (hvd.size() - 1) + 1) / hvd.size()
    for group in optimizer.param_groups:
        group["lr"] = args.base_lr * lr_scaler * factor


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    loss_metric = Metric("train_loss")
    for batch_idx, (data, target) in enumerate(train_loader):
        adjust_learning_rate(epoch, batch_idx)
        optimizer.zero_grad()
        for part in range(0, len(data), args.batch_size):
            scores = model(data[part : part + args.batch_size])
            loss = nn.functional.cross_entropy(scores, target[part : part + args.batch_size])
            loss_metric.update(loss)
            (loss * len(scores) / len(data)).backward()
        optimizer.step()
    return loss_metric.mean


def validate():
    model.eval()
    loss_metric, accuracy_metric = Metric("test_loss"), Metric("test_accuracy")
    with torch.no_grad():
        for data, target in test_loader:
            scores = model(data)
            loss_metric.update(nn.functional.cross_entropy(scores, target))
            accuracy_metric.update(accuracy(scores, target))
    return loss_metric.mean, accuracy_metric.mean


for epoch in range(resume_from_epoch, args.epochs):
    train_loss = train(epoch)
    test_loss, test_accuracy = validate()
    if verbose:
        print(
            f"epoch {epoch + 1}: train loss {train_loss:.5f}, test loss {test_loss:.5f}, accuracy {test_accuracy:.4f}"
        )
    if hvd.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))
hvd.shutdown()
