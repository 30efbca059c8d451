"""What goes wrong in training scripts: a backward that fails, gradients replaced, models changed or copied midway."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.ranks(2, 3)

FAILED = "failed midway"


class Fail(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("on purpose")


def parameters(device, count=4, value=1.0):
    return [torch.nn.Parameter(torch.tensor(value, device=device)) for _ in range(count)]


def product(tensors, x, fails=False):
    """The gradient of each parameter of value 1 is ``x``. The last ones come first; half of them where it fails."""
    for k, tensor in enumerate(tensors):
        x = x * tensor
        if fails and 2 * k == len(tensors):
            x = Fail.apply(x)
    return x


def sgd(tensors, lr=1.0, **options):
    return torch.optim.SGD(tensors, lr=lr, **options)


def assert_good_step(hvd, optimizer, tensors):
    optimizer.zero_grad()
    product(tensors, torch.tensor(hvd.rank() + 1.0, device=tensors[0].device)).backward()
    optimizer.step()
    assert [tensor.grad.item() for tensor in tensors] == [(hvd.size() + 1) / 2] * len(tensors)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_bytes", [0, None], ids=["many-buckets", "one-bucket"])
@pytest.mark.parametrize("then", ["zero_grad", "grad = None", "nothing", "wrap"])
def test_a_backward_that_fails_on_all_ranks(hvd, device, overlap, bucket_bytes, then):
    tensors = parameters(device)
    optimizer = hvd.DistributedOptimizer(sgd(tensors, 0.0), overlap=overlap, bucket_bytes=bucket_bytes)
    for _ in range(3):
        assert_good_step(hvd, optimizer, tensors)
        optimizer.zero_grad()
        with pytest.raises(ValueError, match="on purpose"):
            product(tensors, torch.tensor(1.0, device=device), fails=True).backward()
        if then == "zero_grad":
            optimizer.zero_grad()
        elif then == "grad = None":
            for tensor in tensors:
                tensor.grad = None
        elif then == "wrap":
            optimizer = hvd.DistributedOptimizer(optimizer, overlap=overlap, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("compression", ["none", "topk"])
@pytest.mark.parametrize("bucket_bytes", [0, None], ids=["many-buckets", "one-bucket"])
@pytest.mark.parametrize("then", ["zero_grad", "backward", "wrap"])
def test_a_backward_that_fails_on_one_rank_is_an_error_on_all(hvd, device, compression, bucket_bytes, then):
    """Some of its gradients have gone already: others would train with them, and this rank would not."""
    tensors = parameters(device)
    optimizer = hvd.DistributedOptimizer(
        sgd(tensors, 0.0), overlap=True, bucket_bytes=bucket_bytes, compression=getattr(hvd.Compression, compression)
    )
    x = torch.tensor(1.0, device=device)
    optimizer.zero_grad()
    if hvd.rank() == 1:
        with pytest.raises(ValueError, match="on purpose"):
            product(tensors, x, fails=True).backward()
    with pytest.raises(hvd.HorovodInternalError, match=FAILED):
        if hvd.rank() == 1 and then == "zero_grad":
            optimizer.zero_grad()
        elif hvd.rank() == 1 and then == "wrap":
            hvd.DistributedOptimizer(optimizer)
        else:
            product(tensors, x).backward()
    if then != "wrap":
        assert_good_step(hvd, optimizer, tensors)


@pytest.mark.parametrize("failing", ["one", "all"])
def test_a_backward_that_fails_beside_sparse_gradients(hvd, device, failing):
    tensors, table = parameters(device), torch.nn.Embedding(4, 1, sparse=True).to(device)
    torch.nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(sgd([*tensors, table.weight]), overlap=True, bucket_bytes=0)
    rows = torch.tensor([hvd.rank()], device=device)

    def backward(fails=False):
        optimizer.zero_grad()
        product(tensors, table(rows).sum() + 1.0, fails).backward()

    for step in range(4):
        if step % 2:
            fails = failing == "all" or hvd.rank() == 1
            with pytest.raises(ValueError) if fails else pytest.raises(hvd.HorovodInternalError, match=FAILED):
                backward(fails)
            with pytest.raises(hvd.HorovodInternalError) if failing == "one" and fails else contextlib.nullcontext():
                optimizer.zero_grad()
        else:
            with torch.no_grad():
                for tensor in tensors:
                    tensor.fill_(1.0)
                table.weight.zero_()
            backward()
            optimizer.step()
            expected = [-1 / hvd.size() if row < hvd.size() else 0.0 for row in range(4)]
            assert table.weight.flatten().tolist() == pytest.approx(expected)
            assert tensors[0].item() == pytest.approx(0.0)


def test_a_failed_backward_is_retried_where_nothing_was_under_way(hvd, device):
    """Without overlap a rank may fail, clear and try again; the others wait for it."""
    tensors = parameters(device)
    optimizer = hvd.DistributedOptimizer(sgd(tensors, 0.0), overlap=False)
    if hvd.rank() == 1:
        with pytest.raises(ValueError, match="on purpose"):
            product(tensors, torch.tensor(1.0, device=device), fails=True).backward()
    assert_good_step(hvd, optimizer, tensors)


def test_a_step_after_a_failed_backward_counts_what_had_arrived(hvd, device):
    tensors = parameters(device, 2)
    optimizer = hvd.DistributedOptimizer(sgd(tensors, 0.0), overlap=True)
    with contextlib.suppress(ValueError):
        product(tensors, torch.tensor(1.0, device=device), fails=hvd.rank() == 1).backward()
    optimizer.step()
    assert [tensor.grad.item() for tensor in tensors] == pytest.approx([(hvd.size() - 1) / hvd.size()] * 2)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("options", [{}, {"compression": "topk"}, {"op": "Adasum"}], ids=["plain", "topk", "Adasum"])
def test_an_optimizer_is_gone_before_its_rank_joins(hvd, device, overlap, options):
    """A training function has returned on the ranks with less data, and with it its model and optimizer."""
    options = {key: getattr(hvd.Compression if key == "compression" else hvd, name) for key, name in options.items()}

    def train():
        tensors = parameters(device, 2, 0.0)
        optimizer = hvd.DistributedOptimizer(sgd(tensors), overlap=overlap, **options)
        for batch in range(3 if hvd.rank() == 0 else 1):
            optimizer.zero_grad()
            sum(2.0 * (batch + 1) * tensor for tensor in tensors).backward()
            optimizer.step()
        return [tensor.item() for tensor in tensors]

    for _ in range(2):
        weights = train()
        gc.collect()
        assert hvd.join() == 0
        if hvd.rank() == 0:
            share = 1.0 if "op" in options else 1 / hvd.size()
            assert weights == pytest.approx([-2.0 - (4.0 + 6.0) * share] * 2)


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_copies_of_a_wrapped_model_are_plain_ones(hvd, device, op):
    model = torch.nn.Linear(2, 2).to(device)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), op=getattr(hvd, op))
    own = torch.full((1, 2), float(hvd.rank()), device=device)
    model(own).sum().backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [copy.deepcopy(model), torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model))]
    before = model.weight.grad.clone()
    for other in copies:
        other.zero_grad()
        other(own).sum().backward()
        assert other.weight.grad.flatten().tolist() == [hvd.rank()] * 4
    assert torch.equal(model.weight.grad, before)
    model, optimizer = copy.deepcopy((model, optimizer))
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    optimizer.zero_grad()
    model(own).sum().backward()
    assert model.weight.grad.flatten().tolist() == [(hvd.size() - 1) / 2] * 4


def test_step_hooks_run_once_and_see_reduced_gradients(hvd, device):
    (w,) = parameters(device, 1, 0.0)
    calls = []
    optimizer = hvd.DistributedOptimizer(sgd([w]), overlap=False)
    optimizer.register_step_pre_hook(lambda *_: calls.append(w.grad.item()))
    optimizer.register_step_post_hook(lambda *_: calls.append(w.item()))
    (w * hvd.rank()).backward()
    optimizer.step()
    mean = (hvd.size() - 1) / 2
    assert calls == [mean, -mean]


@pytest.mark.parametrize("overlap", ["auto", False])
def test_gradients_that_no_backward_made(hvd, device, overlap):
    (w,) = parameters(device, 1, 0.0)
    optimizer = hvd.DistributedOptimizer(sgd([w]), overlap=overlap)
    for step in range(4):
        w.grad = torch.tensor(hvd.rank() + 1.0, device=device)
        optimizer.step()
        assert w.item() == -(step + 1) * (hvd.size() + 1) / 2
        if step % 2:
            optimizer.zero_grad()


def test_models_that_change_after_the_wrap(hvd, device):
    """Their memory format, then their type; values are those of plain SGD."""
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 4, 3).to(device)
    alone = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters(), 0.1), model.named_parameters())
    plain = sgd(alone.parameters(), 0.1)
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1)).to(device)
    for step in range(6):
        if step == 2:
            model.to(memory_format=torch.channels_last)
        if step == 4:
            model, alone, x = model.double(), alone.double(), x.double()
        optimizer.zero_grad()
        model(x * (hvd.rank() + 1)).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        (sum(alone(x * (rank + 1)).square().mean() for rank in range(hvd.size())) / hvd.size()).backward()
        plain.step()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_models_without_values_are_refused(hvd, device):
    def wrap(*devices):
        layers = [torch.nn.Linear(2, 2, bias=False, device=d) for d in devices]
        model = torch.nn.Sequential(*layers)
        return hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters()
        )

    for devices, named in ([["meta", "meta"], "0.weight"], [[device, "meta"], "1.weight"]):
        with pytest.raises(ValueError, match=rf"{named}.*meta.*to_empty"):
            wrap(*devices)
    real = hvd.rank() != 1
    with pytest.raises(hvd.HorovodInternalError if real else ValueError, match=r"0\.weight.*meta.*to_empty"):
        wrap(device if real else "meta")
    wrap(device)


def test_a_parameter_frozen_on_one_rank_counts_as_zero_there(hvd, device):
    a, b = parameters(device, 2, 0.0)
    optimizer = hvd.DistributedOptimizer(sgd([a, b]), [("a", a), ("b", b)])
    for frozen in (True, False):
        b.requires_grad_(not (frozen and hvd.rank() == 1))
        optimizer.zero_grad()
        (a + b).backward()
        optimizer.step()
        assert a.grad.item() == 1
        assert b.grad.item() == pytest.approx((hvd.size() - frozen) / hvd.size())


def test_a_parameter_unfrozen_on_one_rank_is_found_out(hvd, device):
    a, b = parameters(device, 2, 0.0)
    b.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(sgd([a, b]), [("a", a), ("b", b)])
    b.requires_grad_(hvd.rank() == 1)
    with pytest.raises(hvd.HorovodInternalError, match=r"out of step.*new plan"):
        (a + b).backward()
        optimizer.step()
    hvd.shutdown()
    hvd.init()


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"])
def test_parameters_of_any_layout(hvd, device, options):
    values = [
        torch.zeros(4, 6).t(), torch.zeros(3, 4, 5).permute(2, 0, 1), torch.zeros(0, 3), torch.zeros(()),
        torch.zeros(2, 1, 3).expand(2, 1, 3),
    ]
    if "fused" not in options:  # torch's own is wrong there
        values.append(torch.zeros(8)[::2])
    tensors = [torch.nn.Parameter(value.to(device)) for value in values]
    optimizer = hvd.DistributedOptimizer(sgd(tensors, **options))
    for _ in range(2):
        optimizer.zero_grad()
        (sum(tensor.sum() for tensor in tensors) * hvd.rank()).backward()
        optimizer.step()
    assert all(bool((tensor == 1 - hvd.size()).all()) for tensor in tensors)


def test_one_parameter_in_two_optimizers(hvd, device):
    shared, a, b = parameters(device, 3, 0.0)
    first, second = (hvd.DistributedOptimizer(sgd([shared, own])) for own in (a, b))
    for _ in range(2):
        first.zero_grad()
        second.zero_grad()
        ((shared + a + b) * hvd.rank()).backward()
        first.step()
        second.step()
    assert [t.item() for t in (a, b, shared)] == [1 - hvd.size(), 1 - hvd.size(), 2 - 2 * hvd.size()]


def test_an_optimizer_that_calls_its_closure_twice(hvd, device):
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            for _ in range(2):
                with torch.enable_grad():
                    loss = closure()
                super().step()
            return loss

    (w,) = parameters(device, 1, 0.0)
    optimizer = hvd.DistributedOptimizer(Twice([w], lr=1.0))

    def closure():
        optimizer.zero_grad()
        loss = w * hvd.rank()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert w.item() == 1 - hvd.size()
