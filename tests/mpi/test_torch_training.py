"""Training on N ranks equals one process on the joined batch, for every optimizer that torch ships."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings

import pytest

from tests.soak import mixed

torch = pytest.importorskip("torch")

STEPS = 4
ROWS = 3


OPTIONS = {
    "ASGD": {"lr": 0.01, "t0": 2},
    "Adadelta": {"lr": 0.5},
    "Adam": {"lr": 0.01, "amsgrad": True, "fused": True},
    "AdamW": {"lr": 0.01, "foreach": True},
    "LBFGS": {"lr": 0.1, "max_iter": 3},
    "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.5},
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}
OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)
WAYS = [
    {"overlap": True, "bucket_bytes": 100},
    {"overlap": False, "groups": 2, "passes": 3, "gradient_predivide_factor": 2.0},
    {"overlap": True, "groups": 2, "passes": 2, "bucket_bytes": 100},
    {"overlap": False},
]


def make_optimizer(name, model):
    tensors = list(model.parameters())
    if name == "Muon":
        tensors = [tensor for tensor in tensors if tensor.dim() == 2]
    return getattr(torch.optim, name)(tensors, **OPTIONS.get(name, {"lr": 0.01}))


def make_model(device, sparse=False):
    torch.manual_seed(3)
    layers = [torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)]
    if sparse:
        layers = [torch.nn.Embedding(7, 3, sparse=True)]
    return torch.nn.Sequential(*layers).double().to(device)


def batch(step, rank, device, sparse=False):
    generator = torch.Generator().manual_seed(100 * step + rank)
    if sparse:
        return torch.randint(7, (ROWS,), generator=generator).to(device)
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


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.limit(60)
def test_equals_one_process_on_the_joined_batch(hvd, device, name):
    """Whatever the way the gradients go; the same bits on all ranks, and again in another run."""
    sparse = name == "SparseAdam"

    def run(passes=1, **options):
        model = make_model(device, sparse)
        optimizer = hvd.DistributedOptimizer(
            make_optimizer(name, model), model.named_parameters(), backward_passes_per_step=passes, **options
        )
        return train(model, optimizer, lambda step: batch(step, hvd.rank(), device, sparse), passes)

    def joined(step):
        return torch.cat([batch(step, rank, device, sparse) for rank in range(hvd.size())])

    for way in WAYS:
        mine, alone = run(**way), make_model(device, sparse)
        expected = train(alone, make_optimizer(name, alone), joined, way.get("passes", 1))
        assert_bit_identical(hvd, mine)
        for a, b in zip(mine, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert all(map(torch.equal, mine, run(**way)))


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
    method = getattr(hvd.Compression, compression)
    model = make_model(device).float()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters(),
        compression=method(1) if compression == "powersgd" else method,  # a higher rank leaves the 8 x 5 weights whole
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
@pytest.mark.limit(600)
@pytest.mark.parametrize("times", [100, pytest.param(3000, marks=pytest.mark.slow)])
def test_many_wraps(hvd, device, times):
    """The same parameters wrapped again and again leave no thread, descriptor, mapping or hook behind."""
    def wrapped_step(w):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=0.1))
        optimizer.zero_grad()
        (w.sum() * (hvd.rank() + 1)).backward()
        optimizer.step()
        return optimizer

    w = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64, device=device))
    gc.collect()  # optimizers that earlier tests have left in cycles
    optimizer = wrapped_step(w)
    before = mixed.left_behind()
    for _ in range(times):
        optimizer = wrapped_step(w)
    assert w.tolist() == pytest.approx([-0.15 * (times + 1)] * 4)
    assert len(w._post_accumulate_grad_hooks) == 1
    del optimizer
    assert mixed.left_behind() == before


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
