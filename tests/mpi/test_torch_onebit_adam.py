"""1-bit Adam: torch's Adam while its variance settles, one bit per element of momentum after that."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.ranks(1, 2, 3)


def model(device):
    torch.manual_seed(0)
    return torch.nn.Linear(20, 10).to(device)


def backward(layer, rank, step):
    """A loss of this rank's own; ranks pull in different directions."""
    inputs = torch.randn(16, 20, generator=torch.Generator().manual_seed(100 * step + rank))
    target = inputs[:, :10] * (1 + rank)
    layer.zero_grad()
    loss = ((layer(inputs.to(layer.weight.device)) - target.to(layer.weight.device)) ** 2).mean()
    loss.backward()
    return loss.item()


def adam_step(layer, optimizer, size, step):
    """The reference: torch's Adam on the mean of all ranks' gradients, computed on every rank."""
    total = [torch.zeros_like(p) for p in layer.parameters()]
    for rank in range(size):
        backward(layer, rank, step)
        for t, p in zip(total, layer.parameters(), strict=True):
            t += p.grad / size
    for t, p in zip(total, layer.parameters(), strict=True):
        p.grad = t
    optimizer.step()


def test_warm_up_is_torchs_adam_with_averaged_gradients(hvd, device):
    mine, theirs = model(device), model(device)
    ours = hvd.OneBitAdam(mine.parameters(), lr=0.01, weight_decay=0.1, warmup_steps=10)
    reference = torch.optim.Adam(theirs.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(5):
        backward(mine, hvd.rank(), step)
        ours.step()
        adam_step(theirs, reference, hvd.size(), step)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_one_bit_per_element_goes_on_descending_alike_on_all_ranks(hvd, device):
    mine = model(device)
    ours = hvd.OneBitAdam(
        mine.parameters(), lr=0.02, warmup_steps=30, named_parameters=mine.named_parameters()
    )
    losses = []
    for step in range(100):
        if step in (30, 99):
            losses.append(sum(backward(mine, rank, 1000) for rank in range(hvd.size())))
        backward(mine, hvd.rank(), step)
        ours.step()
    assert losses[1] < losses[0]
    for p in mine.parameters():
        gathered = hvd.allgather(p.detach().reshape(1, -1), name="weights")
        assert (gathered == gathered[0]).all()
        assert ours.state[p]["residual"].numel() == p.numel()


def test_it_finds_the_least_squares_solution_of_all_ranks_data(hvd, device):
    """Ranks pull far apart, so that most of every rank's gradient is noise to the others; the answer is exact."""
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(hvd.size(), 64, 20, generator=random)
    inputs[..., :10] *= 0.01  # variances of one parameter that differ 10,000-fold
    targets = torch.randn(hvd.size(), 64, 10, generator=random) + 3 * inputs[..., 10:]
    rows, wanted = inputs.flatten(0, 1), targets.flatten(0, 1)
    solution = torch.linalg.lstsq(rows.double(), wanted.double()).solution
    best = ((rows @ solution.float() - wanted) ** 2).mean().item()
    start = (wanted**2).mean().item()
    weight = torch.zeros(20, 10, device=device, requires_grad=True)
    ours = hvd.OneBitAdam([weight], lr=0.1, warmup_steps=100)
    rates = torch.optim.lr_scheduler.LambdaLR(ours, lambda step: 1 - step / 400)
    for _ in range(400):
        ours.zero_grad()
        ((inputs[hvd.rank()].to(device) @ weight - targets[hvd.rank()].to(device)) ** 2).mean().backward()
        ours.step()
        rates.step()
    found = ((rows @ weight.detach().cpu() - wanted) ** 2).mean().item()
    assert found - best < 0.01 * (start - best)


def test_elements_without_a_gradient_in_warm_up_move_no_farther_than_others(hvd, device):
    """Inputs that were always zero, as the corners of scanned digits are."""
    weight = torch.zeros(4, 8, device=device, requires_grad=True)
    ours = hvd.OneBitAdam([weight], lr=0.01, warmup_steps=5)
    for step in range(25):
        ours.zero_grad()
        scale = torch.ones(8, device=device) * (1 + hvd.rank())
        if step < 20:
            scale[4:] = 0
        (weight * scale).sum().backward()
        ours.step()
    assert weight.abs().max() <= 0.01 * 25 * 1.5
    assert (weight[:, :4] < 0).all()


@pytest.mark.parametrize("before", ["unused", "zero"])
def test_a_parameter_that_joins_after_the_warm_up_takes_adams_steps(hvd, device, before):
    early, late = (torch.zeros(16, device=device, requires_grad=True) for _ in range(2))
    ours = hvd.OneBitAdam([early, late], lr=0.01, warmup_steps=3)
    for step in range(10):
        ours.zero_grad()
        loss = early.sum() * (1 + hvd.rank())
        if step >= 5:
            loss = loss + 1000 * late.sum()
        elif before == "zero":
            loss = loss + 0 * late.sum()
        loss.backward()
        ours.step()
    torch.testing.assert_close(early.detach().cpu(), torch.full((16,), -0.1), rtol=0.01, atol=0)
    assert (late < 0).all()
    assert late.abs().max() <= 0.051


def test_a_state_that_plain_adam_saved_goes_on(hvd, device):
    weight, other = (torch.zeros(16, device=device, requires_grad=True) for _ in range(2))
    plain = torch.optim.Adam([weight], lr=0.01)
    for _ in range(4):
        plain.zero_grad()
        weight.sum().backward()
        plain.step()
    ours = hvd.OneBitAdam([other], lr=0.01, warmup_steps=4)
    ours.load_state_dict(plain.state_dict())
    with torch.no_grad():
        other.copy_(weight)
    other.sum().backward()
    ours.step()
    torch.testing.assert_close(other.detach().cpu(), torch.full((16,), -0.05), rtol=1e-3, atol=0)


def test_a_saved_state_goes_on_where_it_stopped(hvd, device):
    layer = model(device)
    optimizer = hvd.OneBitAdam(layer.parameters(), warmup_steps=2)
    for step in range(4):
        backward(layer, hvd.rank(), step)
        optimizer.step()
    saved = copy.deepcopy((layer.state_dict(), optimizer.state_dict()))
    backward(layer, hvd.rank(), 4)
    optimizer.step()
    other = model(device)
    resumed = hvd.OneBitAdam(other.parameters(), warmup_steps=2)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    backward(other, hvd.rank(), 4)
    resumed.step()
    for a, b in zip(layer.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("added_at", [0, 1, 6])
def test_a_group_that_is_added_later_is_exchanged_too(hvd, device, added_at):
    """Before the first step, during the warm-up and after it, as layers are unfrozen."""
    early, late = (torch.zeros(16, device=device, requires_grad=True) for _ in range(2))
    ours = hvd.OneBitAdam([early], lr=0.01, warmup_steps=3)
    for step in range(10):
        if step == added_at:
            ours.add_param_group({"params": [late]})
        ours.zero_grad()
        ((early.sum() + late.sum()) * (1 + hvd.rank())).backward()
        ours.step()
    torch.testing.assert_close(early.detach().cpu(), torch.full((16,), -0.1), rtol=0.01, atol=0)
    torch.testing.assert_close(late.detach().cpu(), torch.full((16,), -0.01 * (10 - added_at)), rtol=0.01, atol=0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_goes_on_with_parameters_of_its_own(hvd, device, copied):
    """Before the first step, during the warm-up and after it."""
    layer = model(device)
    optimizer = hvd.OneBitAdam(layer.parameters(), lr=0.01, warmup_steps=2)
    for step in range(4):
        other, again = copied((layer, optimizer))
        for network, steps_it in ((layer, optimizer), (other, again)):
            backward(network, hvd.rank(), step)
            steps_it.step()
        for a, b in zip(layer.parameters(), other.parameters(), strict=True):
            assert a is not b
            assert torch.equal(a, b)


def test_what_is_no_compression_is_refused_before_the_warm_up(hvd):
    with pytest.raises(TypeError, match=r"Compression\.fp16"):
        hvd.OneBitAdam([torch.zeros(1, requires_grad=True)], compression="topk")


def test_without_warm_up_there_is_no_step_size(hvd):
    with pytest.raises(ValueError, match="warmup_steps"):
        hvd.OneBitAdam([torch.zeros(1, requires_grad=True)], warmup_steps=0)


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscaled first"])
@pytest.mark.parametrize("warmup_steps", [2, 100])
def test_a_grad_scaler(hvd, device, warmup_steps, unscale):
    """The same training as without, and a step that overflowed on one rank is skipped on all."""
    last = hvd.size() - 1
    scaled, plain = model(device), model(device)
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    optimizers = [hvd.OneBitAdam(layer.parameters(), warmup_steps=warmup_steps) for layer in (scaled, plain)]
    for step in range(6):
        before = scaled.weight.detach().clone()
        inputs = torch.randn(16, 20, generator=torch.Generator().manual_seed(100 * step + hvd.rank())).to(device)
        losses = [(layer(inputs) ** 2).mean() for layer in (scaled, plain)]
        overflows = step == 3
        scaler.scale(losses[0] * (float("inf") if overflows and hvd.rank() == last else 1.0)).backward()
        losses[1].backward()
        if unscale:
            scaler.unscale_(optimizers[0])
        scaler.step(optimizers[0])
        scaler.update()
        if overflows:
            assert torch.equal(scaled.weight, before)
        else:
            optimizers[1].step()
        scaled.zero_grad()
        plain.zero_grad()
    for a, b in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert scaler.get_scale() == (2.0 if hvd.rank() == last else 4.0)
