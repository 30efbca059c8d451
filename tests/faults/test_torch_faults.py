"""Faults in a training loop with torch: in a hook, in backward, in a DataLoader, in an optimizer step."""

from __future__ import annotations

import pytest

from tests.faults.jobs import STALL, assert_bad_end, assert_good_end, job, needs, tagged
from tests.launch import run_ranks

pytestmark = needs("torch")

PREAMBLE = """
import os, signal, sys, threading, time
import torch
import horo_lite.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

def step():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()

step()
"""
LIMIT_S = 120.0  # importing torch takes long on a busy machine


def torch_job(body: str, **options):
    return job(body, preamble=PREAMBLE, limit_s=LIMIT_S, **options)


@pytest.mark.openmpi
def test_an_exception_in_a_backward_hook():
    done = torch_job("""
        def hook(gradient):
            raise ValueError("in a hook")
        if rank == 1:
            model.weight.register_hook(hook)
        step()
        time.sleep(60)
    """)
    assert_bad_end(done, r"\[rank 1\] ValueError: in a hook")
    assert tagged(done)[-1].startswith("[rank 1]")


def test_an_exception_in_a_training_step():
    assert_bad_end(torch_job("model(torch.ones(2, 3)) if rank == 1 else step()"), r"\[rank 1\] RuntimeError: mat1")


def test_an_exception_in_a_worker_of_a_data_loader():
    done = torch_job("""
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                if rank == 1:
                    raise OSError("no such file")
                return torch.ones(4)
        for batch in torch.utils.data.DataLoader(Data(), num_workers=1):
            step()
    """)
    assert_bad_end(done, r"\[rank 1\] OSError: Caught OSError in DataLoader worker", "no such file")


def test_a_rank_with_fewer_batches():
    done = torch_job("for _ in range(2 + (rank == 0)): step()", env=STALL)
    assert_bad_end(done, "has waited .*rank 1 has finished", r"join\(\)")


def test_a_rank_that_is_stuck_in_a_step():
    done = torch_job("time.sleep(60) if rank == 1 else None; step()", env=STALL)
    assert_bad_end(done, "has waited .*rank 1 has not submitted it")


def test_parameters_that_differ():
    done = torch_job("""
        other = torch.nn.Linear(3 + rank, 1)
        hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), other.named_parameters())
    """)
    assert_bad_end(done, "DisagreementError", "weight")


def test_a_rank_that_is_killed_while_it_saves_leaves_the_earlier_checkpoint(tmp_path):
    path, copy = tmp_path / "model.pt", tmp_path / "copy.pt"
    done = torch_job("""
        import shutil
        path, copy = sys.argv[1:]
        hvd.save_checkpoint(path, model, optimizer, epoch=1)  # the same file on all ranks
        assert os.path.exists(path)
        hvd.barrier()
        if rank == 0:
            shutil.copy(path, copy)
            def half(content, file):
                file.write(b"half of it")
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            torch.save = half
        hvd.save_checkpoint(path, model, optimizer, epoch=2)
    """, arguments=(str(path), str(copy)))
    assert_bad_end(done)
    assert path.read_bytes() == copy.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_every_kind_end_with_the_job(method, tmp_path):
    script = tmp_path / "train.py"  # a file: spawn imports it
    script.write_text(
        "import torch\nimport horo_lite.torch as hvd\n"
        "if __name__ == '__main__':\n"
        "    hvd.init()\n"
        "    data = torch.utils.data.TensorDataset(torch.ones(8, 4))\n"
        f"    options = dict(num_workers=1, persistent_workers=True, multiprocessing_context={method!r})\n"
        "    loader = torch.utils.data.DataLoader(data, **options)\n"
        "    for epoch in range(2):\n"
        "        for batch, in loader:\n"
        "            assert (hvd.allreduce(batch, op=hvd.Sum, name='x') == hvd.size()).all()\n"
    )
    assert_good_end(run_ranks(script, 2, limit_s=LIMIT_S))


@pytest.mark.slow
def test_workers_of_data_loaders_end_with_the_job():
    done = torch_job("""
        data = torch.utils.data.TensorDataset(torch.ones(8, 4))
        for workers in (0, 2):
            for batch in torch.utils.data.DataLoader(data, num_workers=workers, persistent_workers=workers > 0):
                step()
    """)
    assert_good_end(done)
