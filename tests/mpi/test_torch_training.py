"""Training on N ranks equals one process on the joined batch, for every optimizer that torch ships."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch")

STEPS = 4
ROWS = 3


def optimizers():
    o = torch.optim
    found = {
        "SGD": lambda p: o.SGD(p, lr=0.05),
        "momentum": lambda p: o.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        "Adam": lambda p: o.Adam(p, lr=0.01, amsgrad=True),
        "Adam-fused": lambda p: o.Adam(p, lr=0.01, fused=True),
        "AdamW-foreach": lambda p: o.AdamW(p, lr=0.01, foreach=True),
        "Adamax": lambda p: o.Adamax(p, lr=0.01),
        "Adadelta": lambda p: o.Adadelta(p),
        "Adafactor": lambda p: o.Adafactor(p, lr=0.01),
        "Adagrad": lambda p: o.Adagrad(p, lr=0.01),
        "ASGD": lambda p: o.ASGD(p, lr=0.01),
        "NAdam": lambda p: o.NAdam(p, lr=0.01),
        "RAdam": lambda p: o.RAdam(p, lr=0.01),
        "RMSprop": lambda p: o.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
        "Rprop": lambda p: o.Rprop(p, lr=0.01),
        "LBFGS": lambda p: o.LBFGS(p, lr=0.1, max_iter=3),
    }
    if hasattr(o, "Muon"):
        found["Muon"] = lambda p: o.Muon([q for q in p if q.dim() == 2], lr=0.01)
    return found


def make_model(device):
    torch.manual_seed(3)
    layers = [torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)]
    return torch.nn.Sequential(*layers).double().to(device)


def batch(step, rank, device):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, 5, generator=generator, dtype=torch.float64).to(device)


def train(model, optimizer, batches, passes=1):
    for step in range(STEPS):
        def closure(step=step):
            optimizer.zero_grad()
            for micro in range(passes):
                loss = model(batches(step * passes + micro)).square().mean()
                loss.backward()
            return loss

        optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else (closure(), optimizer.step())
    return [p.detach().clone() for p in model.parameters()]


def assert_bit_identical(hvd, tensors):
    flat = torch.cat([t.reshape(-1) for t in tensors])
    rows = hvd.allgather(flat[None])
    assert torch.equal(rows, rows[:1].expand_as(rows))


def compare(hvd, device, make, passes=1, **options):
    model, alone = make_model(device), make_model(device)
    own = hvd.DistributedOptimizer(
        make(model.parameters()), named_parameters=model.named_parameters(), backward_passes_per_step=passes, **options
    )
    mine = train(model, own, lambda step: batch(step, hvd.rank(), device), passes)
    joined = train(
        alone, make(alone.parameters()),
        lambda step: torch.cat([batch(step, rank, device) for rank in range(hvd.size())]), passes,
    )
    assert_bit_identical(hvd, mine)
    for a, b in zip(mine, joined, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", optimizers())
def test_equals_one_process(hvd, device, name):
    compare(hvd, device, optimizers()[name])


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "at-step"])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("groups", [None, 2], ids=["free", "groups"])
@pytest.mark.parametrize("bucket_bytes", [None, 100], ids=["one-bucket", "many"])
@pytest.mark.ranks(2, 3)
def test_equals_one_process_with_options(hvd, device, overlap, passes, groups, bucket_bytes):
    compare(
        hvd, device, optimizers()["momentum"], passes, overlap=overlap, groups=groups, bucket_bytes=bucket_bytes,
        gradient_predivide_factor=2.0,
    )


@pytest.mark.ranks(2)
@pytest.mark.limit(180)
def test_equals_one_process_with_compilation_and_checkpointing(hvd, device):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(torch.nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.layers, self.reentrant = make_model(device), reentrant

        def forward(self, x):
            for start in (0, 2):
                x = checkpoint(self.layers[start : start + 2], x, use_reentrant=self.reentrant)
            return self.layers[4](x)

    def of(model):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters())
        return train(model, optimizer, lambda step: batch(step, hvd.rank(), device).requires_grad_())

    expected = of(make_model(device))
    for model in (Checkpointed(False), Checkpointed(True), torch.compile(make_model(device), backend="aot_eager")):
        got = of(model)
        assert_bit_identical(hvd, got)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("compression", ["fp16", "bf16", "topk", "powersgd"])
@pytest.mark.ranks(2, 3)
def test_compressed_training_stays_identical_and_keeps_its_state(hvd, device, compression):
    model = make_model(device).float()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters(),
        compression=getattr(hvd.Compression, compression),
    )
    got = train(model, optimizer, lambda step: batch(step, hvd.rank(), device).float())
    assert_bit_identical(hvd, got)
    state = optimizer.state_dict()["state"][0]
    assert "exp_avg" in state and ("residual" in state) == (compression in ("topk", "powersgd"))
    plain = torch.optim.Adam(make_model(device).float().parameters(), lr=0.01)
    plain.load_state_dict(optimizer.state_dict())
    assert plain.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


def test_pickle_copy_and_state_dict(hvd, device):
    model = make_model(device)
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    train(model, optimizer, lambda step: batch(step, hvd.rank(), device))
    scheduler.step()
    assert isinstance(optimizer, torch.optim.Adam) and type(optimizer).__name__ == "Adam"
    assert optimizer is plain
    expected = optimizer.state_dict()
    file = io.BytesIO()
    torch.save({"optimizer": expected, "scheduler": scheduler.state_dict()}, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    again = torch.optim.Adam(make_model(device).parameters(), lr=0.5)
    again.load_state_dict(read["optimizer"])
    for copied in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer), again):
        assert type(copied) is torch.optim.Adam
        assert copied.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.005
        for index, p in enumerate(copied.param_groups[0]["params"]):
            for key, value in copied.state[p].items():
                assert torch.equal(value, expected["state"][index][key])
    optimizer.load_state_dict(read["optimizer"])
    wrapped = hvd.DistributedOptimizer(copy.deepcopy(optimizer))
    wrapped.zero_grad()
    train(model, optimizer, lambda step: batch(step, hvd.rank(), device))


@pytest.mark.ranks(2)
def test_many_wraps(hvd, device):
    """The same parameters wrapped again and again leave no communicator, mapping or hook behind."""
    w = torch.nn.Parameter(torch.zeros(4, device=device))
    for _ in range(300):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=0.1))
        optimizer.zero_grad()
        (w.sum() * (hvd.rank() + 1)).backward()
        optimizer.step()
    assert w.tolist() == pytest.approx([-0.1 * 1.5 * 300] * 4, rel=1e-4)
    assert len(w._post_accumulate_grad_hooks) == 1
    with open("/proc/self/maps") as maps:
        assert sum("horo_lite" in line for line in maps) < 20


@pytest.mark.ranks(2, 3)
def test_two_networks_trained_in_turn(hvd, device):
    """A generator and a discriminator: the backward of one reaches the other's parameters."""
    g = torch.nn.Parameter(torch.ones(1, device=device))
    d = torch.nn.Parameter(torch.ones(1, device=device))
    mean = (hvd.size() + 1) / 2
    og = hvd.DistributedOptimizer(torch.optim.SGD([g], lr=0.1))
    od = hvd.DistributedOptimizer(torch.optim.SGD([d], lr=0.1))
    own, ref_g, ref_d = hvd.rank() + 1.0, 1.0, 1.0
    for _ in range(3):
        od.zero_grad()
        (d * g * own).sum().backward()
        od.step()
        ref_d -= 0.1 * ref_g * mean
        og.zero_grad()
        (d * g * own).sum().backward()
        og.step()
        ref_g -= 0.1 * ref_d * mean
    assert d.item() == pytest.approx(ref_d, rel=1e-5) and g.item() == pytest.approx(ref_g, rel=1e-5)


def test_no_warnings_in_an_ordinary_run(hvd, device):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = make_model(device)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        train(model, optimizer, lambda step: batch(step, hvd.rank(), device))
