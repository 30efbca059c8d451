"""Making ranks equal: parameters, optimizer state, disagreements."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")


def make_model(device, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).to(device)


def reference(device):
    return make_model(device, seed=0).state_dict()


@pytest.mark.parametrize("kind", ["dict", "list", "generator", "module"])
def test_broadcast_parameters(hvd, device, kind):
    model = make_model(device, seed=hvd.rank())
    argument = {
        "dict": model.state_dict(),
        "list": list(model.named_parameters()),
        "generator": model.named_parameters(),
        "module": model,
    }[kind]
    hvd.broadcast_parameters(argument, root_rank=0)
    expected = reference(device)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name])


def test_values_that_are_no_tensors_follow_in_a_mapping(hvd):
    params = {"epoch": 7 if hvd.rank() == 0 else 0, "w": torch.full((2,), float(hvd.rank()))}
    hvd.broadcast_parameters(params, root_rank=0)
    assert params["epoch"] == 7 and params["w"].tolist() == [0, 0]


@pytest.mark.ranks(2, 3)
def test_models_that_differ_are_named_on_every_rank(hvd):
    last = hvd.rank() == hvd.size() - 1
    tensors = [(f"layer{k}", torch.zeros(2)) for k in range(6 if last else 4)]
    with pytest.raises(hvd.HorovodInternalError, match=rf"rank 0: 4.*rank {hvd.size() - 1}: 6.*layer4"):
        hvd.broadcast_parameters(tensors, root_rank=0)
    shapes = [("w", torch.zeros(3 if last else 2))]
    with pytest.raises(hvd.HorovodInternalError, match=r"first difference: w .*\[2\].*\[3\]"):
        hvd.broadcast_parameters(shapes, root_rank=0)


@pytest.mark.parametrize("wrong", [3, torch.ones(2), [("a",)], [1]], ids=["number", "tensor", "single", "numbers"])
def test_what_is_no_collection_of_parameters(hvd, wrong):
    with pytest.raises(ValueError, match="broadcast_parameters"):
        hvd.broadcast_parameters(wrong, root_rank=0)


@pytest.mark.parametrize("kind", ["meta", "sparse", "complex32"])
def test_a_parameter_that_cannot_be_sent_is_named(hvd, kind):
    odd = {
        "meta": lambda: torch.zeros(2, device="meta"),
        "sparse": lambda: torch.eye(2).to_sparse(),
        "complex32": lambda: torch.zeros(2, dtype=torch.complex32),
    }[kind]()
    with pytest.raises(TypeError, match=rf"head\.weight.*{kind}"):
        hvd.broadcast_parameters({"body.weight": torch.zeros(2), "head.weight": odd}, root_rank=0)


def optimizers():
    o = torch.optim
    return {
        "SGD": lambda p: o.SGD(p, lr=0.1),
        "momentum": lambda p: o.SGD(p, lr=0.1, momentum=0.9),
        "Adam": lambda p: o.Adam(p, amsgrad=True),
        "AdamW": lambda p: o.AdamW(p, lr=torch.tensor(0.01)),
        "Adamax": lambda p: o.Adamax(p),
        "Adadelta": lambda p: o.Adadelta(p),
        "Adafactor": lambda p: o.Adafactor(p),
        "Adagrad": lambda p: o.Adagrad(p),
        "ASGD": lambda p: o.ASGD(p),
        "NAdam": lambda p: o.NAdam(p),
        "RAdam": lambda p: o.RAdam(p),
        "RMSprop": lambda p: o.RMSprop(p, momentum=0.5, centered=True),
        "Rprop": lambda p: o.Rprop(p),
        "LBFGS": lambda p: o.LBFGS(p, max_iter=3),
    }


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("name", optimizers())
@pytest.mark.parametrize("others", ["fresh", "used"])
@pytest.mark.ranks(1, 2)
def test_broadcast_optimizer_state(hvd, device, name, others):
    """Whatever state the other ranks have, the root's arrives with its types, and no weight changes."""
    def trained(steps, seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2).to(device)
        optimizer = optimizers()[name](model.parameters())
        for _ in range(steps):
            def closure():
                optimizer.zero_grad()
                loss = model(torch.ones(4, 3, device=device)).square().sum()
                loss.backward()
                return loss
            optimizer.step(closure)
        return model, optimizer

    model, optimizer = trained(3, 0) if hvd.rank() == 0 else trained(5 if others == "used" else 0, 1)
    before = [p.clone() for p in model.parameters()]
    _, expected = trained(3, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert equal(optimizer.state_dict(), expected.state_dict())
    assert all(map(torch.equal, before, model.parameters()))
    model(torch.ones(1, 3, device=device)).sum().backward()
    if name != "LBFGS":
        optimizer.step()


def test_broadcast_optimizer_state_of_odd_parameters(hvd, device):
    """Parameters without gradient, integer ones, options that are None."""
    parameters = [
        torch.nn.Parameter(torch.ones(2, device=device)),
        torch.nn.Parameter(torch.ones(2, device=device), requires_grad=False),
        torch.nn.Parameter(torch.ones(2, dtype=torch.int64, device=device), requires_grad=False),
    ]
    optimizer = torch.optim.Adam(parameters, lr=0.1 * (hvd.rank() + 1))
    if hvd.rank() == 0:
        parameters[0].sum().backward()
        optimizer.step()
    groups = optimizer.param_groups
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups is groups and groups[0]["lr"] == 0.1 and groups[0]["foreach"] is None
    assert optimizer.state[parameters[0]]["step"].dtype == torch.float32
    assert len(optimizer.state) == 1


@pytest.mark.ranks(2)
def test_resume_on_rank_0_only(hvd, device):
    w = torch.nn.Parameter(torch.zeros(1, device=device))
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)

    def step():
        w.grad = torch.full((1,), 2.0, device=device)
        optimizer.step()

    if hvd.rank() == 0:
        step()
        step()
    hvd.broadcast_parameters([("w", w)], root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert w.item() == pytest.approx(-0.58)
    assert optimizer.state[w]["momentum_buffer"].item() == pytest.approx(3.8)
    step()
    assert w.item() == pytest.approx(-1.122)
