"""`make demo`: two ranks train on handwritten digits, and the same run shows what one process alone does.

Fails when the accuracy is under 97 %, or when the ranks' weights differ in a single bit.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

import horo_lite.torch as hvd
from horo_lite.cli.machine import usable_cores

RANKS, BATCH, EPOCHS, ALONE_EPOCHS, TEST = 2, 96, 12, 3, 357
ENOUGH_ACCURACY = 0.97


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 images of 8 x 8 pixels and what they show, in an order that every rank agrees on."""
    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return (images[order] / 16).float().reshape(-1, 1, 8, 8), labels[order]


def network() -> nn.Module:
    """A small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10),
    )


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor,
                rank: int = 0, ranks: int = 1) -> tuple[torch.Tensor, float]:
    """One pass over the images in batches of BATCH, of which this rank takes its share; mean loss and seconds."""
    order = torch.randperm(len(images))
    mean_loss, batches = torch.zeros(()), len(images) // BATCH
    start = time.perf_counter()
    for batch in order.split(BATCH)[:batches]:
        mine = batch[rank::ranks]
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean_loss += loss.detach() / batches
    return mean_loss, time.perf_counter() - start


def images_per_second_alone(images: torch.Tensor, labels: torch.Tensor) -> float:
    """What plain PyTorch does in one process, with one thread or with all cores, while the other ranks wait."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    threads, seconds = torch.get_num_threads(), []
    for count in {1, usable_cores()}:
        torch.set_num_threads(count)
        seconds += [train_epoch(model, optimizer, images, labels)[1] for _ in range(ALONE_EPOCHS)]
    torch.set_num_threads(threads)
    return len(images) // BATCH * BATCH / min(seconds)


def digest(model: nn.Module) -> str:
    """Equal for two ranks exactly when all bits of their weights are."""
    weights = [value.detach().numpy().tobytes() for value in model.state_dict().values()]
    return hashlib.sha256(b"".join(weights)).hexdigest()


def main() -> int:
    """What each rank does; the exit status."""
    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()
    console = Console(quiet=rank != 0, highlight=False)
    images, labels = digits()
    train_images, train_labels = images[TEST:], labels[TEST:]

    alone = images_per_second_alone(train_images, train_labels) if rank == 0 else 0.0
    torch.manual_seed(0)
    hvd.barrier()

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    console.print(f"{len(train_images):,} images on {ranks} ranks, {torch.get_num_threads()} thread(s) each\n")
    console.print("epoch     loss  accuracy  images/s", style="bold")
    rates = []
    for epoch in range(EPOCHS):
        loss, seconds = train_epoch(model, optimizer, train_images, train_labels, rank, ranks)
        loss = hvd.allreduce(loss, name="loss")
        rates.append(len(train_images) // BATCH * BATCH / seconds)
        with torch.no_grad():
            accuracy = (model(images[:TEST]).argmax(1) == labels[:TEST]).float().mean().item()
        console.print(f"{epoch + 1:5} {loss:8.4f} {accuracy:9.2%} {rates[-1]:9,.0f}")

    equal = len(set(hvd.allgather_object(digest(model)))) == 1
    enough = accuracy >= ENOUGH_ACCURACY
    summary = Table(show_header=False, box=None, pad_edge=False)
    summary.add_row("accuracy on images not seen", f"{accuracy:.2%}", "" if enough else f"under {ENOUGH_ACCURACY:.0%}")
    summary.add_row(f"images per second, {ranks} ranks", f"{max(rates):,.0f}")
    summary.add_row("images per second, one process alone", f"{alone:,.0f}")
    summary.add_row("bytes exchanged by each rank", f"{hvd.wire_stats().payload_bytes:,}")
    summary.add_row("the ranks' weights", "equal in every bit" if equal else "DIFFER")
    console.print()
    console.print(summary)
    console.print("\ndemo passed" if enough and equal else "\ndemo FAILED", style="bold")
    return 0 if enough and equal else 1


if __name__ == "__main__":
    if "--rank" in sys.argv:
        sys.exit(main())
    run = [sys.executable, "-m", "horo_lite.cli", "run", "-np", str(RANKS), "--no-tag", __file__, "--rank"]
    sys.exit(subprocess.run(run, check=False).returncode)
