"""What compression does to a model: final accuracy or loss with each method against none, on 4 ranks and 3 seeds.

    python benchmarks/accuracy.py                         # both tasks; goes on where an earlier run stopped
    python benchmarks/accuracy.py --tasks digits --methods none "topk 1 %" --seeds 1

Two tasks: scikit-learn's handwritten digits with one hidden layer and SGD with momentum, judged by test accuracy; and
a small character-level transformer with Adam on the standard library's source, judged by its loss on another module.
Every run of a task sees the same batches and initial weights for the same seed.

The ranks are in one process (``support.world``): their compressors see what they would see in four, so results are
those of a real job up to the order of additions, for the arithmetic alone.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from support.report import RESULTS, Report
from support.world import World
from torch import nn

from horo_lite.compression import Compression as C
from horo_lite.interfaces import Parameter

RANKS = 4
WARMUP = 0.2
"""The uncompressed share of a run for methods whose papers start so (1-bit Adam: 15 to 20 %)."""


# --- Tasks --------------------------------------------------------------------------------------------------------


class Digits:
    """1,797 images of 8 x 8 pixels; a fifth of them is for testing."""

    name, unit = "digits", "accuracy, %"
    steps, batch, tested = 600, 96, 357
    momentum = 0.9

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        self._images, self._labels = (images[order] / 16).float().reshape(-1, 1, 8, 8), labels[order]

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def optimizer(self, parameters: Iterator[nn.Parameter], momentum: bool) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=self.momentum if momentum else 0.0)

    def batches(self, seed: int) -> Iterator[torch.Tensor]:
        """Indices of the images of each step, all ranks' in one."""
        random = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self._images) - self.tested, generator=random) + self.tested
            yield from (part for part in order.split(self.batch) if len(part) == self.batch)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(self._images[batch]), self._labels[batch])

    def result(self, model: nn.Module) -> float:
        right = model(self._images[: self.tested]).argmax(1) == self._labels[: self.tested]
        return right.float().mean().item() * 100

    def lost(self, result: float, reference: float) -> float:
        """Points of accuracy."""
        return reference - result


class Writer(nn.Module):
    """Predicts each next character from those before it."""

    WIDTH, LENGTH = 48, 32

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, self.WIDTH)
        self.places = nn.Parameter(torch.randn(self.LENGTH, self.WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            self.WIDTH, 4, 4 * self.WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(self.WIDTH, letters)
        self.mask = nn.Transformer.generate_square_subsequent_mask(self.LENGTH)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.letters(codes) + self.places, mask=self.mask, is_causal=True))


class Transformer:
    """Python's standard library, by characters; one module is kept for testing."""

    name, unit = "transformer", "loss"
    steps, batch, lr = 600, 16, 5e-3
    trained_on = ("argparse", "ast", "dataclasses", "difflib", "functools", "pathlib", "tarfile", "typing")
    tested_on = "inspect"

    def __init__(self) -> None:
        folder = Path(sysconfig.get_path("stdlib"))

        def source(module: str) -> str:
            files = (folder / f"{module}.py", folder / module / "__init__.py")
            return "".join(path.read_text(encoding="utf-8") for path in files if path.exists())

        text, other = "".join(map(source, self.trained_on)), source(self.tested_on)
        self._alphabet = sorted({*text, *other})
        self._codes, other_codes = (torch.tensor([self._alphabet.index(c) for c in t]) for t in (text, other))
        length = Writer.LENGTH + 1
        self._tested = other_codes[: len(other_codes) // length * length].reshape(-1, length)[::4]

    def model(self) -> nn.Module:
        return Writer(len(self._alphabet))

    def optimizer(self, parameters: Iterator[nn.Parameter], momentum: bool) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=self.lr, betas=(0.9 if momentum else 0.0, 0.999))

    def batches(self, seed: int) -> Iterator[torch.Tensor]:
        """Where the windows of each step start, all ranks' in one."""
        random = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randint(len(self._codes) - Writer.LENGTH - 1, (self.batch,), generator=random)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return self._of_windows(model, torch.stack([self._codes[s : s + Writer.LENGTH + 1] for s in batch]))

    def result(self, model: nn.Module) -> float:
        return self._of_windows(model, self._tested).item()

    def _of_windows(self, model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
        scores = model(windows[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())

    def lost(self, result: float, reference: float) -> float:
        """Percent of the loss."""
        return (result / reference - 1) * 100


Task = Digits | Transformer
TASKS: dict[str, Callable[[], Task]] = {"digits": Digits, "transformer": Transformer}
ALLOWED = {"digits": (0.5, "points of accuracy"), "transformer": (1.0, "% of loss")}


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Warm-up over a twentieth of the steps, then a straight line to zero."""
    rising = max(1, steps // 20)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rising, (steps - step) / (steps - rising))
    )


# --- Methods ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Method:
    """A method at its usual setting.

    Attributes:
        make: the compression, for a run of so many steps.
        momentum: False where the method keeps the momentum and the optimizer has none.
        judged: whether it promises what no compression gives: it has feedback, or loses next to nothing.
    """

    make: Callable[[int], Any]
    momentum: bool = True
    judged: bool = True


def _late(method: Any) -> Callable[[int], Any]:
    """After an uncompressed beginning."""
    return lambda steps: C.warmup(method, int(WARMUP * steps))


METHODS: dict[str, Method] = {
    "none": Method(lambda _: C.none),
    "bf16": Method(lambda _: C.with_feedback(C.bf16)),
    "fp8": Method(lambda _: C.with_feedback(C.fp8)),
    "int8": Method(lambda _: C.with_feedback(C.int8)),
    "natural": Method(lambda _: C.with_feedback(C.natural)),
    "sign": Method(_late(C.sign)),
    "onebit": Method(_late(C.onebit)),
    "topk 1 %": Method(_late(C.topk(0.01))),
    "randomk 10 %": Method(_late(C.with_feedback(C.randomk(0.1)))),
    "randomk 1 %": Method(_late(C.with_feedback(C.randomk(0.01))), judged=False),
    "threshold": Method(_late(C.threshold(0.01))),
    "dgc 0.1 %": Method(lambda steps: C.dgc(warmup_steps=int(WARMUP * steps)), momentum=False),
    "powersgd rank 4": Method(_late(C.powersgd(4))),
}


def train(task: Task, method: Method, seed: int) -> float:
    """One run of all ranks; returns the task's result."""
    torch.manual_seed(seed)
    model = task.model()
    names, weights = zip(*model.named_parameters(), strict=True)
    optimizer = task.optimizer(model.parameters(), method.momentum)
    rates = schedule(optimizer, task.steps)
    parameters = [Parameter(name, tuple(p.shape)) for name, p in zip(names, weights, strict=True)]
    world = World(method.make(task.steps), parameters, RANKS)
    batches = task.batches(seed)
    for _ in range(task.steps):
        batch = next(batches)
        gradients = [gradient_of(task, model, batch[rank::RANKS]) for rank in range(RANKS)]
        for p, mean in zip(weights, world.mean(gradients), strict=True):
            p.grad = torch.from_numpy(mean.copy()).view_as(p)
        optimizer.step()
        rates.step()
    with torch.no_grad():
        return task.result(model)


def gradient_of(task: Task, model: nn.Module, batch: torch.Tensor) -> list[Any]:
    """One rank's gradient, flat arrays."""
    gradients = torch.autograd.grad(task.loss(model, batch), list(model.parameters()))
    return [gradient.reshape(-1).numpy() for gradient in gradients]


# --- All of it ----------------------------------------------------------------------------------------------------


def finished_runs(path: Path) -> list[dict[str, Any]]:
    """What an earlier call has written."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            {**row, "seed": int(row["seed"]), "result": float(row["result"]), "seconds": float(row["seconds"])}
            for row in csv.DictReader(file)
        ]


def run_all(options: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    """Train what is missing, seed by seed, writing after every run."""
    runs = finished_runs(options.output / "accuracy.csv")
    known = {(run["task"], run["method"], run["seed"]) for run in runs}
    wanted = [
        (name, method, seed) for seed in range(options.seeds) for name in options.tasks for method in options.methods
    ]
    tasks = {name: TASKS[name]() for name in options.tasks}
    for number, (name, method, seed) in enumerate(wanted, 1):
        if (name, method, seed) in known:
            continue
        start = time.thread_time()
        result = train(tasks[name], METHODS[method], seed)
        seconds = time.thread_time() - start
        runs.append({"task": name, "method": method, "seed": seed, "result": result, "seconds": round(seconds, 2)})
        report.csv(runs)
        report.note(f"{number} of {len(wanted)}: {name}, {method}, seed {seed}: {result:.3f} ({seconds:.1f} s)")
    return runs


def show(name: str, runs: Sequence[dict[str, Any]], report: Report) -> None:
    """One task's table, bars and targets; what is lost is the mean over seeds, each against no compression's."""
    task, (allowed, unit) = TASKS[name](), ALLOWED[name]
    results = {
        method: {run["seed"]: run["result"] for run in runs if (run["task"], run["method"]) == (name, method)}
        for method in METHODS
    }
    reference = results["none"]
    rows, losses = [], {}
    for method, by_seed in results.items():
        seeds = sorted(by_seed.keys() & reference.keys())
        if not seeds:
            continue
        lost = [task.lost(by_seed[seed], reference[seed]) for seed in seeds]
        losses[method] = {"lost": statistics.mean(lost)}
        rows.append(
            [method, f"{statistics.mean(by_seed[seed] for seed in seeds):.3f}", f"{losses[method]['lost']:+.2f}",
             f"{min(lost):+.2f} to {max(lost):+.2f}", len(seeds)]
        )  # fmt: skip
        if METHODS[method].judged and method != "none":
            report.target(f"{name}, {method}: lost", losses[method]["lost"], at_most=allowed, unit=unit)
    report.table(
        f"{name}: {RANKS} ranks, {task.steps} steps",
        ["method", task.unit, f"lost, {unit}", "over seeds", "seeds"], rows,
    )
    losses.pop("none", None)
    report.bars(
        f"{name}: lost against no compression (allowed: {allowed:g})", unit,
        {method.replace(" ", "\n"): lost for method, lost in losses.items()}, name,
    )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    report = Report("accuracy", options.output)
    runs = run_all(options, report)
    for name in options.tasks:
        show(name, runs, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
