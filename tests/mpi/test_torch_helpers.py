"""SyncBatchNorm, checkpoints, consistency, sharding and elastic state."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest

from horo_lite.interfaces import Reduced, SumRequest

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("horo_lite.torch.checkpoint")


def parts(hvd, *sizes):
    """Rows of the joined batch for each rank; ranks beyond the list have none."""
    return sizes[hvd.rank()] if hvd.rank() < len(sizes) else 0


@pytest.mark.ranks(2)
def test_sync_batch_norm_by_hand(hvd, device):
    norm = hvd.SyncBatchNorm(1, momentum=1.0).to(device)
    x = torch.tensor([[1.0], [2.0], [3.0]] if hvd.rank() == 0 else [[5.0]], device=device)
    got = norm(x)
    torch.testing.assert_close(got, (x - 2.75) / (2.1875 + 1e-5) ** 0.5)
    assert norm.running_mean.item() == pytest.approx(2.75)
    assert norm.running_var.item() == pytest.approx(2.9166667)
    if hvd.rank() == 0:
        norm.eval()
        norm(x)  # the other rank does not take part


@pytest.mark.parametrize("shape", [(), (4,), (3, 2)], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_sync_batch_norm_equals_one_process(hvd, device, shape, affine):
    size = hvd.size()
    whole = torch.randn(2 * size, 3, *shape, generator=torch.Generator().manual_seed(0)).to(device)
    kind = [torch.nn.BatchNorm1d, torch.nn.BatchNorm1d, torch.nn.BatchNorm2d][len(shape)]
    alone, mine = kind(3, affine=affine).to(device), hvd.convert_sync_batchnorm(kind(3, affine=affine).to(device))
    assert isinstance(mine, hvd.SyncBatchNorm)
    for _ in range(2):
        x = whole.clone().requires_grad_()
        alone(x).pow(3).sum().backward()
        rows = slice(2 * hvd.rank(), 2 * hvd.rank() + 2)
        y = whole[rows].clone().requires_grad_()
        mine(y).pow(3).sum().backward()
        torch.testing.assert_close(y.grad, x.grad[rows], rtol=1e-4, atol=1e-4)
    if affine:
        summed = hvd.allreduce(mine.weight.grad, op=hvd.Sum)
        torch.testing.assert_close(summed, alone.weight.grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(mine.running_var, alone.running_var)
    torch.testing.assert_close(mine.running_mean, alone.running_mean)
    assert mine.num_batches_tracked.item() == 2


def test_conversion_keeps_the_model(hvd, device):
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.BatchNorm2d(2), torch.nn.Flatten()).to(device)
    before = model.state_dict()
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model and isinstance(model[1], hvd.SyncBatchNorm)
    assert model.state_dict().keys() == before.keys()
    with pytest.raises(ValueError, match="at least 2D"):
        model[1](torch.ones(2, device=device))


def trained(hvd, device, compression=None, steps=3):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(),
        compression=compression or hvd.Compression.none,
    )
    for step in range(steps):
        one_step(hvd, device, model, optimizer, step)
    return model, optimizer


def one_step(hvd, device, model, optimizer, step):
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(10 * step + hvd.rank())
    model(torch.randn(2, 6, generator=generator).to(device)).square().sum().backward()
    optimizer.step()


@pytest.fixture
def folder(hvd, tmp_path):
    return hvd.broadcast_object(str(tmp_path))


class Growing:
    """Sends 1, 2, 3, ... times the gradient; counts under a name that SGD has too, in a type of numpy's."""

    def reduce(self, gradients, states, group):
        means = []
        for gradient, state in zip(gradients, states, strict=True):
            state["momentum_buffer"] = np.float32(state.get("momentum_buffer", 0) + 1)
            means.append((yield SumRequest(gradient * state["momentum_buffer"], 1 / group.size)))
        return Reduced(means, gradients)


@pytest.mark.parametrize("compression", ["none", "topk", "of a user's own"])
def test_resume_equals_the_unbroken_run(hvd, device, folder, compression):
    method = getattr(hvd.Compression, compression, Growing)
    model, optimizer = trained(hvd, device, method)
    if method is Growing:
        assert optimizer.state[model.weight]["compressor.momentum_buffer"] == 3
    path = os.path.join(folder, "deep", "check.pt")
    hvd.save_checkpoint(path, model, optimizer, epoch=7, note={"a": [1, 2]})
    one_step(hvd, device, model, optimizer, 3)
    again, fresh = trained(hvd, device, method, steps=0)
    with torch.no_grad():
        again.weight.add_(hvd.rank())
    assert hvd.load_checkpoint(path, again, fresh) == {"epoch": 7, "note": {"a": [1, 2]}}
    one_step(hvd, device, again, fresh, 3)
    assert torch.equal(again.weight, model.weight) and torch.equal(again.bias, model.bias)
    assert sorted(os.listdir(os.path.dirname(path))) == ["check.pt"]


def test_a_checkpoint_that_cannot_be_written_or_read(hvd, device, folder):
    model, optimizer = trained(hvd, device, steps=1)
    with pytest.raises(hvd.HorovodInternalError, match="rank 0"):
        hvd.save_checkpoint(os.path.join(folder, "bad.pt"), model, optimizer, strange=object())
    with pytest.raises(hvd.HorovodInternalError, match="rank 0"):
        hvd.load_checkpoint(os.path.join(folder, "none.pt"), model)
    hvd.barrier()
    assert os.listdir(folder) == []
    hvd.save_checkpoint(os.path.join(folder, "weights.pt"), model)
    with pytest.raises(hvd.HorovodInternalError, match="saved without optimizer"):
        hvd.load_checkpoint(os.path.join(folder, "weights.pt"), model, optimizer)


@pytest.mark.ranks(1)
def test_residuals_come_back_to_their_parameters_device(hvd):
    """A checkpoint is read into host memory; "meta" stands for a GPU."""
    parameter = torch.nn.Parameter(torch.empty(3, device="meta"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    checkpoint._give_rank_own(optimizer, [{0: {"residual": torch.ones(3)}}])
    assert optimizer.state[parameter]["residual"].device == parameter.device


@pytest.mark.ranks(2)
def test_residuals_of_another_number_of_ranks_are_averaged(hvd, device, folder):
    model, optimizer = trained(hvd, device, hvd.Compression.topk)
    path = os.path.join(folder, "check.pt")
    hvd.save_checkpoint(path, model, optimizer)
    if hvd.rank() == 0:
        content = torch.load(path, weights_only=True)
        a, b = (states[0]["residual"] for states in content["rank_states"])
        content["rank_states"].append({0: {"residual": 4 * a + 2 * b}})
        torch.save(content, path)
        expected = (5 * a + 3 * b) / 3
    else:
        expected = None
    expected = hvd.broadcast_object(expected)
    hvd.load_checkpoint(path, model, optimizer)
    torch.testing.assert_close(optimizer.state[model.weight]["residual"], expected)


@pytest.mark.ranks(2, 3)
def test_check_consistency(hvd, device):
    model, optimizer = trained(hvd, device)
    hvd.check_consistency(model, optimizer)
    last = hvd.size() - 1
    if hvd.rank() == last:
        with torch.no_grad():
            model.weight[0, 0] += 1e-3
    with pytest.raises(hvd.DisagreementError, match=rf"weight differs .* \[{last}\]"):
        hvd.check_consistency(model)
    hvd.broadcast_parameters(model, root_rank=0)
    hvd.check_consistency(model)
    if hvd.rank() == last:
        optimizer.state[model.bias]["momentum_buffer"] += 1
    with pytest.raises(hvd.DisagreementError, match="momentum_buffer"):
        hvd.check_consistency(model, optimizer)


@pytest.mark.ranks(2, 3)
def test_shards(hvd):
    dataset = list(range(12))
    sampler = hvd.DistributedSampler(dataset, shuffle=True)
    rows = hvd.allgather(torch.tensor(list(sampler)))
    assert sorted(rows.tolist()) == dataset
    loader = torch.utils.data.DataLoader(dataset, 2, sampler=sampler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hvd.check_shards(loader)
    with pytest.warns(UserWarning, match="same samples"):
        hvd.check_shards(torch.utils.data.DataLoader(dataset, 2, shuffle=True))
    with pytest.warns(UserWarning, match=r"different numbers .*join"):
        hvd.check_shards(dataset[hvd.rank() :])


def test_elastic_state_goes_back_to_the_last_commit(hvd, device):
    model, optimizer = trained(hvd, device, steps=0)
    sampler = hvd.elastic.ElasticSampler(list(range(4 * hvd.size())), shuffle=False)
    state = hvd.elastic.TorchState(model, optimizer, epoch=0, sampler=sampler)
    resets, faults = [], []
    state.register_reset_callbacks([lambda: resets.append(state.epoch)])

    @hvd.elastic.run
    def train(state):
        while state.epoch < 3:
            one_step(hvd, device, state.model, state.optimizer, state.epoch)
            if state.epoch == 1 and not faults:
                faults.append(True)
                with torch.no_grad():
                    state.model.weight.add_(1e3)
                hvd.allreduce(torch.ones(1 + hvd.rank()), name="bad") if hvd.size() > 1 else fail(hvd)
            state.epoch += 1
            state.sampler.record_batch(0, 2)
            state.commit()
        return state.epoch

    assert train(state) == 3
    assert resets == [1]
    expected, _ = trained(hvd, device)
    assert torch.equal(model.weight, expected.weight)
    assert len(sampler.processed_indices) == 2 * hvd.size() + 2  # everyone's first two, then this rank's next


def fail(hvd):
    raise hvd.HorovodInternalError("as if another rank had failed")


def test_elastic_training_gives_up_on_a_permanent_fault(hvd):
    @hvd.elastic.run
    def train(state):
        fail(hvd)

    with pytest.raises(hvd.HorovodInternalError):
        train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=0))


def test_elastic_sampler_goes_on_with_the_rest(hvd):
    dataset = list(range(6 * hvd.size()))
    sampler = hvd.elastic.ElasticSampler(dataset)
    first = sampler.get_indices(0, 2)
    assert first == list(sampler)[:2]
    sampler.record_batch(0, 2)
    state = hvd.elastic.TorchState(sampler=sampler)
    state.sync()
    assert len(sampler) == 4
    rest = hvd.allgather(torch.tensor(list(sampler))).tolist()
    done = hvd.allgather(torch.tensor(first)).tolist()
    assert sorted(rest + done) == dataset
    sampler.set_epoch(1)
    assert len(sampler) == 6
