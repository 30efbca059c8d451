"""Scripts as they are written for Horovod run unchanged under ``horo-lite run --horovod``."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

import pytest

from tests.launch import ROOT, SCALE, child_environment

pytest.importorskip("torch")
pytest.importorskip("sklearn")

DIGITS = str(ROOT / "examples" / "torch_horovod_digits.py")


def run(*words: str, ranks: int = 2) -> str:
    """What rank 0 prints."""
    command = [sys.executable, "-m", "horo_lite.cli", "run", "-np", str(ranks), "--horovod", *words]
    done = subprocess.run(
        command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, timeout=120 * SCALE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def epochs(output: str) -> dict[int, list[float]]:
    """Losses and accuracy of each epoch."""
    lines = re.findall(r"epoch (\d+): train loss (\S+), test loss (\S+), accuracy (\S+)", output)
    return {int(epoch): [float(value) for value in values] for epoch, *values in lines}


def test_a_run_that_resumes_equals_the_unbroken_one(tmp_path):
    where = ["--checkpoint-format", str(tmp_path / "digits-{epoch}.pt")]
    unbroken = epochs(run(DIGITS, *where, "--epochs", "2"))
    assert list(unbroken) == [1, 2] and unbroken[2][2] > 0.8
    (tmp_path / "digits-2.pt").unlink()
    assert epochs(run(DIGITS, *where, "--epochs", "2")) == {2: unbroken[2]}


@pytest.mark.parametrize(
    "options",
    [
        ["--fp16-allreduce", "--gradient-predivide-factor", "2", "--batches-per-allreduce", "2"],
        pytest.param(["--use-adasum"], marks=pytest.mark.slow),
    ],
    ids=["fp16", "Adasum"],
)
def test_horovods_options(tmp_path, options):
    found = epochs(run(DIGITS, "--checkpoint-format", str(tmp_path / "{epoch}.pt"), "--epochs", "3", *options))
    assert found[3][2] > 0.8


ELASTIC = """
import sys
import torch
import horovod
import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.util import check_extension, gloo_built, is_iterable, mpi_built, split_list
from horovod.runner import run as horovod_run
from horovod.torch.elastic import ElasticSampler, TorchState, run
from horovod.torch.elastic.state import ModelStateHandler, get_handler_registry
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import Average, Sum, allreduce, allreduce_async_, poll, rank, size, synchronize

assert horovod.run is horovod_run and (torch.nn.Module, ModelStateHandler) in get_handler_registry()
assert mpi_built() and not gloo_built(verbose=True) and split_list([1, 2, 3], 2) == [[1, 2], [3]]
check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
hvd.init()
torch.manual_seed(rank())
dataset = torch.arange(24.0).reshape(12, 2)
sampler = ElasticSampler(dataset, shuffle=False)
loader = torch.utils.data.DataLoader(dataset, 2, sampler=sampler)
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters())
failures = []


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * size()


@run
def train(state):
    for state.epoch in range(state.epoch, 2):
        for batch_idx, data in enumerate(loader):
            state.optimizer.zero_grad()
            state.model(data).square().mean().backward()
            state.optimizer.step()
            state.sampler.record_batch(batch_idx, 2)
            if state.epoch == 1 and batch_idx == 1 and not failures:
                failures.append(batch_idx)
                allreduce(torch.ones(1 + rank()), name="differs")
            state.commits += 1
            state.commit()
        state.sampler.set_epoch(state.epoch + 1)
    return state.commits


state = TorchState(model, optimizer, epoch=0, commits=0, sampler=sampler)
state.register_reset_callbacks([on_state_reset])
commits = train(state)
handle = allreduce_async_(torch.ones(2), op=Sum)
while not poll(handle):
    pass
assert synchronize(handle).tolist() == [size()] * 2 and issubclass(HorovodInternalError, RuntimeError)
weights = hvd.allgather(model.weight.detach())
assert torch.equal(weights, weights[:1].expand_as(weights)) and optimizer.param_groups[0]["lr"] == 1e-3 * size()
print("commits", commits, "failures", len(failures))
"""


def test_elastic_training(tmp_path):
    """One failure of an operation, from which all ranks go back to the last commit."""
    script = tmp_path / "elastic.py"
    script.write_text(textwrap.dedent(ELASTIC))
    assert re.findall(r"commits (\d+) failures (\d)", run(str(script))) == [("6", "1")] * 2
