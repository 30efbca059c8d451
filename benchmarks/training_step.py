"""What data-parallel training adds to a step, against DistributedDataParallel over Gloo.

    python benchmarks/training_step.py [--quick] [--models MLP ResNet-18]
    mpirun -np 2 python benchmarks/training_step.py

The measure is a step of the same model that only meets the other ranks at a barrier: what each adds to that.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.launch import leave, on_ranks
from support.report import Report, seconds_text
from support.timing import Times, in_turn, medians

BARRIER, OURS, AT_STEP, DDP = "barrier only", "horo_lite", "horo_lite, no overlap", "DDP (Gloo)"
TARGETS = {"MLP": 0.35, "transformer": 0.6, "ResNet-18": 0.6}
Step = Callable[[], Any]


def mlp() -> tuple[Any, Any]:
    """8 layers of 1024, 8.4 M parameters, batch 32."""
    import torch

    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers), torch.randn(32, 1024)


def transformer() -> tuple[Any, Any]:
    """4 layers of width 256, 3.2 M parameters, 8 sequences of 64."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(8, 64, 256)


class Residual:
    """Makes ResNet-18 (He et al. 2016) for images of 32 x 32, 11.2 M parameters."""

    @staticmethod
    def block(inside: int, outside: int, stride: int) -> Any:
        """Two convolutions beside a shortcut."""
        import torch

        class Block(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.path = torch.nn.Sequential(
                    torch.nn.Conv2d(inside, outside, 3, stride, 1, bias=False), torch.nn.BatchNorm2d(outside),
                    torch.nn.ReLU(), torch.nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
                    torch.nn.BatchNorm2d(outside),
                )
                same = inside == outside and stride == 1
                self.shortcut = torch.nn.Identity() if same else torch.nn.Conv2d(inside, outside, 1, stride, bias=False)

            def forward(self, x: Any) -> Any:
                return torch.relu(self.path(x) + self.shortcut(x))

        return Block()

    @classmethod
    def model(cls) -> tuple[Any, Any]:
        """The network and a batch of 4."""
        import torch

        widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2),
                  (512, 512, 1)]
        blocks = [cls.block(*width) for width in widths]
        stem = [torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False), torch.nn.BatchNorm2d(64), torch.nn.ReLU()]
        head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(512, 10)]
        return torch.nn.Sequential(*stem, *blocks, *head), torch.randn(4, 3, 32, 32)


MODELS = {"MLP": mlp, "transformer": transformer, "ResNet-18": Residual.model}


def step_of(name: str, kind: str, hvd: Any, comm: Any) -> Step:
    """A training step of a fresh model in one of the four ways."""
    import torch

    torch.manual_seed(0)
    model, batch = MODELS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    if name == DDP:
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif name in (OURS, AT_STEP):
        overlap = "auto" if name == OURS else False
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), overlap=overlap)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        if name == BARRIER:
            comm.Barrier()
        optimizer.step()

    return step


def start_gloo(comm: Any) -> tempfile.TemporaryDirectory[str]:
    """torch.distributed over a file that the first rank's folder holds."""
    import torch.distributed as dist

    folder = tempfile.TemporaryDirectory(prefix="gloo-")
    store = Path(comm.bcast(folder.name)) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=comm.Get_rank(), world_size=comm.Get_size())
    return folder


def overhead(times: Times, name: str) -> float:
    """The median of what a step took beyond the barrier-only step of its own round, in seconds."""
    return statistics.median(own - bare for own, bare in zip(times[name], times[BARRIER], strict=True))


def report_model(report: Report, kind: str, hvd: Any, comm: Any, rounds: int, warm_up: int) -> None:
    """One model's table and target."""
    steps = {name: step_of(name, kind, hvd, comm) for name in (BARRIER, OURS, AT_STEP, DDP)}
    for step in steps.values():
        for _ in range(warm_up):  # overlap is tried out on these
            step()
    times = in_turn(steps, comm, rounds)
    found = medians(times)
    added = {name: overhead(times, name) for name in (OURS, AT_STEP, DDP)}
    report.table(
        f"A training step of the {kind}, {comm.Get_size()} ranks", ["", "step", "added", "of DDP's"],
        [
            [name, seconds_text(seconds), *([None, None] if name == BARRIER else
             [f"{added[name] * 1e3:+.2f} ms", f"{added[name] / added[DDP]:.2f}"])]
            for name, seconds in found.items()
        ],
    )
    report.csv([{"way": name, "step_s": seconds} for name, seconds in found.items()], kind)
    report.target(f"{kind}: added to a step, of DDP's", added[OURS] / added[DDP], at_most=TARGETS[kind])


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds of the MLP alone")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    on_ranks(2)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    import horo_lite.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    report = Report("training_step", writes=hvd.rank() == 0)
    folder = start_gloo(comm)
    for kind in ("MLP",) if options.quick else options.models:
        report_model(report, kind, hvd, comm, *((5, 2) if options.quick else (31, 14)))
    torch.distributed.destroy_process_group()
    folder.cleanup()
    status = report.finish()
    hvd.shutdown()
    leave(status)


if __name__ == "__main__":
    main()
