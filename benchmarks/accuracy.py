"""What compression does to a model: final accuracy or loss with each method against none, on 4 ranks and 3 seeds.

    python benchmarks/accuracy.py                         # all tasks; goes on where an earlier run stopped
    python benchmarks/accuracy.py --tasks digits --methods none "topk 1 %" --seeds 0
    python benchmarks/accuracy.py --shorter 15            # a fifteenth of the steps: what haste costs

Three tasks: scikit-learn's handwritten digits with one hidden layer, by test accuracy; and a small character-level
transformer on the standard library's source, by its loss on another module, once with SGD with momentum, which is the
optimizer of nearly all of the methods' papers, and once with Adam, which is what one would take. Every run of a task
sees the same batches, initial weights and learning rates for the same seed. Learning rates and batches were chosen with
seed 100, which is not reported.

A sparse method needs time: where 0.1 % of the elements are sent, one waits hundreds of steps for its turn, which must
be little of the run. So runs are long and models small, for steps of a millisecond; each processor has a run at a time.

The ranks are in one process (``support.world``): their compressors see what they would see in four, so results are
those of a real job up to the order of additions, for the arithmetic alone. One forward and one backward pass serve all
of them: a weight is repeated for each rank, as the first dimension of every array.
"""

from __future__ import annotations

import argparse
import collections
import csv
import dataclasses
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from support.report import RESULTS, Report
from support.world import World
from torch.nn import functional as F

from horo_lite.compression import Compression as C
from horo_lite.interfaces import Parameter
from horo_lite.torch import OneBitAdam

RANKS = 4
WARMUP = 0.2
"""The uncompressed share of a run for methods whose papers start so (1-bit Adam: 15 to 20 %)."""

Weights = dict[str, torch.Tensor]


# --- Tasks --------------------------------------------------------------------------------------------------------


class Digits:
    """1,797 images of 8 x 8 pixels; a fifth of them is for testing."""

    name, unit = "digits", "accuracy, %"
    allowed, lost_unit = 0.5, "points of accuracy"
    steps, batch, tested = 3_200, 96, 357
    lr, momentum = 0.05, 0.9
    hidden = 128

    def __init__(self, shorter: int = 1) -> None:
        self.steps //= shorter
        from sklearn.datasets import load_digits

        images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        self._images, self._labels = (images[order] / 16).float(), labels[order]

    def weights(self) -> Weights:
        return {
            "first": torch.randn(64, self.hidden) / 8,
            "first_bias": torch.zeros(1, self.hidden),
            "second": torch.randn(self.hidden, 10) / self.hidden**0.5,
            "second_bias": torch.zeros(1, 10),
        }

    def optimizer(self, weights: Sequence[torch.Tensor], momentum: bool) -> torch.optim.Optimizer:
        return torch.optim.SGD(weights, lr=self.lr, momentum=self.momentum if momentum else 0.0)

    def batches(self, seed: int) -> Iterator[torch.Tensor]:
        """Indices of the images of each step. (ranks, images)"""
        random = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self._images) - self.tested, generator=random) + self.tested
            yield from (part.view(RANKS, -1) for part in order.split(self.batch) if len(part) == self.batch)

    def loss(self, weights: Weights, batch: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' losses."""
        scores = self._scores(weights, self._images[batch]).flatten(0, 1)
        return F.cross_entropy(scores, self._labels[batch].flatten()) * len(batch)

    def result(self, weights: Weights) -> float:
        right = self._scores(weights, self._images[None, : self.tested])[0].argmax(1) == self._labels[: self.tested]
        return right.float().mean().item() * 100

    def _scores(self, weights: Weights, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(images @ weights["first"] + weights["first_bias"])
        return hidden @ weights["second"] + weights["second_bias"]

    def lost(self, result: float, reference: float) -> float:
        """Points of accuracy."""
        return reference - result


class Transformer:
    """Python's standard library, by characters; one module is kept for testing.

    One block: attention with two heads and a hidden layer of four times the width, each on normalised input.
    """

    name, unit = "transformer", "loss"
    allowed, lost_unit = 1.0, "% of loss"
    steps, windows = 24_000, 2
    lr, momentum = 0.1, 0.9
    letters, width, length, heads = 64, 16, 16, 2
    trained_on = ("argparse", "ast", "dataclasses", "difflib", "functools", "pathlib", "tarfile", "typing")
    tested_on = "inspect"

    def __init__(self, shorter: int = 1) -> None:
        self.steps //= shorter
        folder = Path(sysconfig.get_path("stdlib"))

        def source(module: str) -> str:
            files = (folder / f"{module}.py", folder / module / "__init__.py")
            return "".join(path.read_text(encoding="utf-8") for path in files if path.exists())

        text, other = "".join(map(source, self.trained_on)), source(self.tested_on)
        usual = [letter for letter, _ in collections.Counter(text).most_common(self.letters - 1)]
        codes = {letter: code for code, letter in enumerate(usual)}
        self._codes, tested = (torch.tensor([codes.get(c, self.letters - 1) for c in t]) for t in (text, other))
        window = self.length + 1
        self._tested = tested[: len(tested) // window * window].view(1, -1, window)

    def weights(self) -> Weights:
        width = self.width
        return {
            "letters": torch.randn(self.letters, width) / 2,
            "places": torch.randn(self.length, width) / 10,
            "queries_keys_values": torch.randn(width, 3 * width) / width**0.5,
            "attention": torch.randn(width, width) / width**0.5 / 2,
            "up": torch.randn(width, 4 * width) / width**0.5,
            "down": torch.randn(4 * width, width) / (4 * width) ** 0.5 / 2,
            "head": torch.randn(width, self.letters) / width**0.5 / 4,
        }

    def optimizer(self, weights: Sequence[torch.Tensor], momentum: bool) -> torch.optim.Optimizer:
        return torch.optim.SGD(weights, lr=self.lr, momentum=self.momentum if momentum else 0.0)

    def batches(self, seed: int) -> Iterator[torch.Tensor]:
        """The windows of each step. (ranks, windows, length + 1)"""
        random, window = torch.Generator().manual_seed(seed), torch.arange(self.length + 1)
        while True:
            starts = torch.randint(len(self._codes) - self.length, (RANKS, self.windows, 1), generator=random)
            yield self._codes[starts + window]

    def loss(self, weights: Weights, batch: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' losses."""
        scores = self._scores(weights, batch[..., :-1]).flatten(0, 1)
        return F.cross_entropy(scores, batch[..., 1:].flatten()) * len(batch)

    def result(self, weights: Weights) -> float:
        return self.loss(weights, self._tested).item()

    def _scores(self, weights: Weights, codes: torch.Tensor) -> torch.Tensor:
        ranks, windows, length = codes.shape
        width, heads = self.width, self.heads
        rank = torch.arange(ranks).view(-1, 1, 1)
        x = weights["letters"][rank, codes] + weights["places"][:, None]
        x = x.view(ranks, windows * length, width)

        mixed = F.layer_norm(x, (width,)) @ weights["queries_keys_values"]
        parts = mixed.view(ranks * windows, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + attended.transpose(1, 2).reshape(x.shape) @ weights["attention"]
        x = x + torch.relu(F.layer_norm(x, (width,)) @ weights["up"]) @ weights["down"]
        return F.layer_norm(x, (width,)) @ weights["head"]

    def lost(self, result: float, reference: float) -> float:
        """Percent of the loss."""
        return (result / reference - 1) * 100


class TransformerWithAdam(Transformer):
    """The same with Adam, which needs fewer steps."""

    name = "transformer-adam"
    steps, lr = 8_000, 0.01

    def optimizer(self, weights: Sequence[torch.Tensor], momentum: bool) -> torch.optim.Optimizer:
        return torch.optim.Adam(weights, lr=self.lr, betas=(0.9 if momentum else 0.0, 0.999), fused=True)


Task = Digits | Transformer
TASKS: dict[str, Callable[[int], Task]] = {task.name: task for task in (Digits, Transformer, TransformerWithAdam)}


def rate(step: int, steps: int) -> float:
    """The share of the learning rate: rising over a twentieth of the steps, then on a straight line to zero."""
    rising = max(1, steps // 20)
    return min((step + 1) / rising, (steps - step) / (steps - rising))


# --- Methods ------------------------------------------------------------------------------------------------------


class InOneProcess(OneBitAdam):
    """``OneBitAdam`` of all ranks: their momenta and variances are the same, only the compressors' states differ."""

    @torch.no_grad()
    def step_of_all(self, gradients: Sequence[torch.Tensor], world: World) -> None:
        """``step`` on every rank, with the gradients of each. (ranks, ...)"""
        (group,) = self.param_groups
        done = self._steps_done()
        settled = done >= self._warmup_steps
        if done == self._warmup_steps:
            self._settle_variances()
        outgoing = []
        for p, of_ranks in zip(group["params"], gradients, strict=True):
            own = []
            for gradient in of_ranks:
                p.grad = gradient
                own.append(self._outgoing(p, group, settled))
            outgoing.append(torch.stack(own))
        means = averaged(outgoing, world) if settled else [g.mean(0) for g in outgoing]
        for p, mean in zip(group["params"], means, strict=True):
            self._update(p, group, mean, settled)


def _usual(task: Task, weights: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    return task.optimizer(weights, momentum=True)


def _without_momentum(task: Task, weights: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    return task.optimizer(weights, momentum=False)


def _onebit_adam(task: Task, weights: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    return InOneProcess(weights, lr=task.lr, warmup_steps=int(WARMUP * task.steps))


@dataclasses.dataclass(frozen=True)
class Method:
    """A method at its usual setting.

    Attributes:
        make: the compression, for a run of so many steps.
        optimizer: of a task's weights; without momentum where the method keeps it.
        judged: the tasks in which it promises what no compression gives, with feedback and its papers' optimizer.
        tasks: where it applies.
    """

    make: Callable[[int], Any]
    optimizer: Callable[[Task, Sequence[torch.Tensor]], torch.optim.Optimizer] = _usual
    judged: tuple[str, ...] = tuple(TASKS)
    tasks: tuple[str, ...] = tuple(TASKS)


def _late(method: Any) -> Callable[[int], Any]:
    """After an uncompressed beginning."""
    return lambda steps: C.warmup(method, int(WARMUP * steps))


WITH_SGD = (Digits.name, Transformer.name)
WITH_ADAM = (TransformerWithAdam.name,)
SHORT = (Digits.name, TransformerWithAdam.name)  # what sends all elements needs no long run to lose nothing

METHODS: dict[str, Method] = {
    "none": Method(lambda _: C.none, judged=()),
    "bf16": Method(lambda _: C.with_feedback(C.bf16), judged=SHORT, tasks=SHORT),
    "fp8": Method(lambda _: C.with_feedback(C.fp8), judged=SHORT, tasks=SHORT),
    "int8": Method(lambda _: C.with_feedback(C.int8), judged=SHORT, tasks=SHORT),
    "natural": Method(lambda _: C.with_feedback(C.natural), judged=SHORT, tasks=SHORT),
    "sign": Method(_late(C.sign), judged=WITH_SGD),
    "onebit": Method(_late(C.onebit), judged=WITH_SGD),
    "OneBitAdam": Method(lambda _: C.onebit, _onebit_adam, tasks=WITH_ADAM),
    "topk 1 %": Method(_late(C.topk(0.01)), judged=WITH_SGD),
    "randomk 10 %": Method(_late(C.with_feedback(C.randomk(0.1))), judged=()),
    "threshold": Method(_late(C.threshold(0.01))),
    "dgc 0.1 %": Method(lambda steps: C.dgc(warmup_steps=int(WARMUP * steps)), _without_momentum, judged=WITH_SGD),
    "powersgd rank 4": Method(_late(C.powersgd(4))),
}


def train(task: Task, method: Method, seed: int) -> float:
    """One run of all ranks; returns the task's result."""
    torch.manual_seed(seed)
    weights = task.weights()
    parameters = [Parameter(name, tuple(w.shape)) for name, w in weights.items()]
    world = World(method.make(task.steps), parameters, RANKS)
    optimizer = method.optimizer(task, list(weights.values()))
    batches = task.batches(seed)
    for step in range(task.steps):
        optimizer.param_groups[0]["lr"] = task.lr * rate(step, task.steps)
        update(optimizer, gradients_of(task, weights, next(batches)), world)
    return task.result({name: w.unsqueeze(0) for name, w in weights.items()})


def gradients_of(task: Task, weights: Weights, batch: torch.Tensor) -> list[torch.Tensor]:
    """All ranks' gradients of every weight. (ranks, ...)"""
    own = {name: w.expand(RANKS, *w.shape).clone().requires_grad_() for name, w in weights.items()}
    return list(torch.autograd.grad(task.loss(own, batch), list(own.values())))


def update(optimizer: torch.optim.Optimizer, gradients: Sequence[torch.Tensor], world: World) -> None:
    """One step of all ranks."""
    if isinstance(optimizer, InOneProcess):
        optimizer.step_of_all(gradients, world)
        return
    for p, mean in zip(optimizer.param_groups[0]["params"], averaged(gradients, world), strict=True):
        p.grad = mean
    optimizer.step()


def averaged(gradients: Sequence[torch.Tensor], world: World) -> list[torch.Tensor]:
    """What every rank is given for arrays of (ranks, ...)."""
    means = world.mean([[g[rank].reshape(-1).numpy() for g in gradients] for rank in range(RANKS)])
    return [torch.from_numpy(mean.copy()).view(g.shape[1:]) for mean, g in zip(means, gradients, strict=True)]


# --- All of it ----------------------------------------------------------------------------------------------------


KINDS: dict[str, Callable[[str], Any]] = {"steps": int, "seed": int, "result": float, "seconds": float}


def finished_runs(path: Path) -> list[dict[str, Any]]:
    """What an earlier call has written."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            {key: number(row[key]) if (number := KINDS.get(key)) else row[key] for key in row}
            for row in csv.DictReader(file)
            if row.keys() >= KINDS.keys()  # an older version wrote less
        ]


def run_all(options: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    """Train what is missing, seed by seed, a run on each processor at a time, writing after every run."""
    runs = finished_runs(options.output / "accuracy.csv")
    known = {(run["task"], run["steps"], run["method"], run["seed"]) for run in runs}
    steps = {name: TASKS[name](options.shorter).steps for name in options.tasks}
    missing = [
        (name, method, seed)
        for seed in options.seeds for name in options.tasks for method in options.methods
        if name in METHODS[method].tasks and (name, steps[name], method, seed) not in known
    ]  # fmt: skip
    processes = ProcessPoolExecutor(options.jobs, get_context("spawn"), torch.set_num_threads, (1,))
    with processes as pool:
        running = {pool.submit(timed, name, options.shorter, method, seed): (name, method, seed)
                   for name, method, seed in missing}  # fmt: skip
        for number, future in enumerate(as_completed(running), 1):
            (name, method, seed), (result, seconds) = running[future], future.result()
            runs.append(
                {"task": name, "steps": steps[name], "method": method, "seed": seed, "result": result,
                 "seconds": round(seconds, 2)}
            )  # fmt: skip
            report.csv(runs)
            report.note(f"{number} of {len(missing)}: {name}, {method}, seed {seed}: {result:.3f} ({seconds:.1f} s)")
    return runs


def timed(name: str, shorter: int, method: str, seed: int) -> tuple[float, float]:
    """One run's result and its processor seconds."""
    start = time.thread_time()
    result = train(TASKS[name](shorter), METHODS[method], seed)
    return result, time.thread_time() - start


def show(name: str, shorter: int, runs: Sequence[dict[str, Any]], report: Report) -> None:
    """One task's table, bars and targets; what is lost is the mean over seeds, each against no compression's."""
    task = TASKS[name](shorter)
    results: dict[str, dict[int, float]] = {method: {} for method in METHODS}
    for run in runs:
        if (run["task"], run["steps"]) == (name, task.steps):
            results[run["method"]][run["seed"]] = run["result"]
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
        if name in METHODS[method].judged:
            report.target(
                f"{name}, {method}: lost", losses[method]["lost"], at_most=task.allowed, unit=task.lost_unit
            )
    report.table(
        f"{name}: {RANKS} ranks, {task.steps} steps",
        ["method", task.unit, f"lost, {task.lost_unit}", "over seeds", "seeds"], rows,
    )
    losses.pop("none", None)
    report.bars(
        f"{name}: lost against no compression (allowed: {task.allowed:g})", task.lost_unit,
        {method.replace(" ", "\n"): lost for method, lost in losses.items()}, name,
    )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--shorter", type=int, default=1, help="divide the number of steps by this")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    report = Report("accuracy", options.output)
    runs = run_all(options, report)
    for name in options.tasks:
        show(name, options.shorter, runs, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
