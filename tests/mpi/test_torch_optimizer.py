"""DistributedOptimizer: what is reduced, when, and what the user sees of it. Values by hand arithmetic."""

from __future__ import annotations

import contextlib
import gc
import warnings

import pytest

torch = pytest.importorskip("torch")

TWICE = "without optimizer.skip_synchronize"


def parameter(device, *values):
    return torch.nn.Parameter(torch.tensor(values, dtype=torch.float32, device=device))


def give(w, *values):
    """A backward pass whose gradient of ``w`` is ``values``."""
    (w * torch.tensor(values, dtype=w.dtype, device=w.device)).sum().backward()


def sgd(w, lr=1.0, **options):
    return torch.optim.SGD(w if isinstance(w, list) else [w], lr=lr, **options)


def assert_equal_on_all_ranks(hvd, tensors):
    for tensor in tensors:
        rows = hvd.allgather(tensor.detach().reshape(1, -1).contiguous())
        assert bool((rows == rows[0]).all()), rows


def mean_rank(hvd):
    return (hvd.size() - 1) / 2


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overlap", ["auto", True, False])
def test_clipping_between_synchronize_and_step(hvd, device, overlap):
    w = parameter(device, 0, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w), named_parameters=[("w", w)], overlap=overlap)
    for skip in (True, False):
        with torch.no_grad():
            w.zero_()
        optimizer.zero_grad()
        give(w, *([6, 0] if hvd.rank() == 0 else [0, 8]))
        optimizer.synchronize()
        assert w.grad.tolist() == [3, 4]
        assert torch.nn.utils.clip_grad_norm_([w], 1.0).item() == pytest.approx(5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if skip:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        assert [TWICE in str(w.message) for w in caught] == ([] if skip else [True])
        torch.testing.assert_close(w.detach().cpu(), torch.tensor([-0.6, -0.8]))


@pytest.mark.ranks(2)
def test_clip_norm(hvd, device):
    w = parameter(device, 0, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w), clip_norm=1.0)
    give(w, *([6, 0] if hvd.rank() == 0 else [0, 8]))
    optimizer.step()
    torch.testing.assert_close(w.detach().cpu(), torch.tensor([-0.6, -0.8]))


def test_gradients_are_reduced_when_backward_returns(hvd, device):
    w = parameter(device, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w))
    give(w, hvd.rank())
    assert w.grad.item() == mean_rank(hvd)
    optimizer.step()
    assert w.item() == -mean_rank(hvd)


def test_without_overlap_changes_before_step_are_honoured(hvd, device):
    w = parameter(device, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w), overlap=False)
    for _ in range(2):
        with torch.no_grad():
            w.zero_()
        optimizer.zero_grad()
        give(w, hvd.rank())
        assert w.grad.item() == hvd.rank()
        w.grad = w.grad * 2
        optimizer.step()
        assert w.item() == -2 * mean_rank(hvd)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_both_kinds_of_zero_grad(hvd, device, set_to_none, quiet):
    w = parameter(device, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w))
    for _ in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        assert w.grad is None or w.grad.item() == 0
        give(w, hvd.rank() + 1)
        assert w.grad.item() == mean_rank(hvd) + 1
        optimizer.step()
    optimizer.zero_grad(set_to_none)
    assert (w.grad is None) == set_to_none


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("unscale_", {}), ("synchronize", {}), ("step", {}), ("synchronize", {"overlap": False}),
        ("step", {"overlap": False}), ("step", {"backward_passes_per_step": 3}),
    ],
    ids=str,
)
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.filterwarnings("ignore:step.. came after")
def test_loss_scaling_skips_on_all_ranks(hvd, device, way, options, fused):
    w = parameter(device, 1)
    optimizer = hvd.DistributedOptimizer(sgd(w, fused=fused), **options)
    scaler = torch.amp.GradScaler(device)

    def step(factor):
        scaler.scale((w * factor).sum()).backward()
        if way == "synchronize":
            optimizer.synchronize()
        if way != "step":
            scaler.unscale_(optimizer)
        with optimizer.skip_synchronize() if way == "synchronize" else contextlib.nullcontext():
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for overflows in (True, False, True, False):
        before, scale = w.item(), scaler.get_scale()
        step(float("inf") if overflows and hvd.rank() == 1 else float(hvd.rank()))
        assert w.item() == before - (0 if overflows else 0.5)
        assert scaler.get_scale() == (scale / 2 if overflows else scale)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fused", [False, True])
def test_loss_scaling_with_adasum(hvd, device, fused):
    """Gradients stay each rank's own: all skip where one overflowed."""
    w = parameter(device, 0, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w, fused=fused), op=hvd.Adasum)
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    for overflows in (True, False):
        factor = float("inf") if overflows and hvd.rank() == 1 else 1.0
        own = torch.tensor([1.0, 0.0] if hvd.rank() == 0 else [0.0, 1.0], device=device)
        scaler.scale((w * own).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert w.tolist() == ([0, 0] if overflows else [-1, -1])
    assert scaler.get_scale() == (2.0 if hvd.rank() == 1 else 4.0)


@pytest.mark.parametrize("overlap", ["auto", False])
def test_windows_and_a_rest_that_is_cleared(hvd, device, overlap, quiet):
    w = parameter(device, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w), backward_passes_per_step=4, overlap=overlap)
    updates = 0
    for _ in range(2):
        optimizer.zero_grad()
        for batch in range(10):
            give(w, hvd.rank() + 1)
            if (batch + 1) % 4 == 0:
                before = w.item()
                optimizer.step()
                optimizer.zero_grad()
                assert w.item() == before - 4 * (mean_rank(hvd) + 1)
                updates += 1
    assert updates == 4
    assert_equal_on_all_ranks(hvd, [w])


@pytest.mark.ranks(2)
def test_a_short_window_is_reduced_as_it_stands(hvd, device, quiet):
    w = parameter(device, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w), backward_passes_per_step=4)
    for _ in range(2):
        give(w, 1 if hvd.rank() == 0 else 3)
    optimizer.step()
    assert w.item() == -4


def test_a_step_after_every_pass_of_a_window_warns_once(hvd, device):
    w = parameter(device, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w), backward_passes_per_step=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(6):
            give(w, hvd.rank())
            optimizer.step()
            optimizer.zero_grad()
            assert w.item() == -(k + 1) * mean_rank(hvd)
    assert [w.filename for w in caught if "backward_passes_per_step" in str(w.message)] == [__file__]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("average", [False, True])
def test_passes_are_summed_or_averaged(hvd, device, average):
    w = parameter(device, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w), backward_passes_per_step=2, average_over_passes=average)
    for micro in (1, 2) if hvd.rank() == 0 else (3, 4):
        give(w, micro)
    optimizer.step()
    assert w.item() == (-2.5 if average else -5)


def test_wrong_numbers_of_passes(hvd, device):
    w = parameter(device, 0)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="backward_passes_per_step must be > 0"):
            hvd.DistributedOptimizer(sgd(w), backward_passes_per_step=wrong)
    optimizer = hvd.DistributedOptimizer(sgd(w))
    optimizer.set_backward_passes_per_step(2)
    give(w, hvd.rank())
    assert w.grad.item() == hvd.rank()
    give(w, hvd.rank())
    assert w.grad.item() == 2 * mean_rank(hvd)


def test_two_models_with_the_same_names(hvd, device):
    models = [torch.nn.Linear(1, 1, bias=False).to(device) for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(sgd(list(m.parameters())), m.named_parameters()) for m in models]
    for k, model in enumerate(models):
        model(torch.full((1, 1), hvd.rank() + 10.0 * k, device=device)).sum().backward()
    for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        optimizer.step()
        assert model.weight.grad.item() == mean_rank(hvd) + 10 * k


def test_without_names_in_two_groups(hvd, device):
    tensors = [parameter(device, 0) for _ in range(5)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([{"params": tensors[:3]}, {"params": tensors[3:]}], lr=1.0))
    sum(10 * k * t.sum() + hvd.rank() * t.sum() for k, t in enumerate(tensors)).backward()
    optimizer.step()
    assert [t.grad.item() for t in tensors] == [10 * k + mean_rank(hvd) for k in range(5)]


def test_names_that_do_not_cover_the_optimizer(hvd, device):
    tensors = [torch.nn.Parameter(torch.zeros(k + 1, 2, device=device)) for k in range(4)]
    names = [(f"p{k}", t) for k, t in enumerate(tensors)]
    with pytest.raises(ValueError, match=r"shape \[4, 2\]"):
        hvd.DistributedOptimizer(sgd(tensors), named_parameters=names[:3])
    with pytest.raises(ValueError, match=r"tuples \(name, parameter\)"):
        hvd.DistributedOptimizer(sgd(tensors), named_parameters=tensors)
    with pytest.raises(ValueError, match="duplicates: p0"):
        hvd.DistributedOptimizer(sgd(tensors), named_parameters=[*names, ("p0", parameter(device, 1))])
    with pytest.raises(TypeError, match=r"compression=hvd\.Compression\.fp16"):
        hvd.DistributedOptimizer(sgd(tensors), hvd.Compression.fp16)


@pytest.mark.ranks(2)
def test_a_parameter_used_on_some_ranks_counts_as_zero_elsewhere(hvd, device):
    a, b, c = (parameter(device, 0) for _ in range(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW([a, b, c], lr=0.1))
    give(*((a, 4) if hvd.rank() == 0 else (b, 6)))
    assert a.grad.item() == 2 and b.grad.item() == 3 and c.grad is None
    optimizer.step()
    assert c.item() == 0 and a.item() < 0 and b.item() < 0


def test_wrapping_again_every_epoch(hvd, device):
    w = parameter(device, 0)
    same = sgd(w)
    for epoch in range(4):
        optimizer = hvd.DistributedOptimizer(sgd(w) if epoch < 2 else same, named_parameters=[("w", w)])
        optimizer.zero_grad()
        give(w, 2 * hvd.rank() + 1)
        assert w.grad.item() == 2 * mean_rank(hvd) + 1
        optimizer.step()
        assert len(w._post_accumulate_grad_hooks) == 1
    assert w.item() == -4 * (2 * mean_rank(hvd) + 1)


def test_a_dropped_optimizer_exchanges_nothing(hvd, device):
    w = parameter(device, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w))
    del optimizer
    gc.collect()
    give(w, hvd.rank())
    assert w.grad.item() == hvd.rank()


def test_schedulers_made_before_and_after(hvd, device, quiet):
    w = parameter(device, 0)
    plain = sgd(w, lr=0.1)
    before = torch.optim.lr_scheduler.StepLR(plain, 1, 0.1)
    optimizer = hvd.DistributedOptimizer(plain)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    give(w, hvd.rank())
    optimizer.step()
    assert w.item() == pytest.approx(-0.1 * mean_rank(hvd))
    before.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    after.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    plateau.step(1.0)
    plateau.step(2.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0005)


def test_half_the_parameters_frozen(hvd, device):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)).to(device)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1)
    model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=1.0),
        named_parameters=model.named_parameters(),
    )
    model(torch.full((1, 2), float(hvd.rank()), device=device)).sum().backward()
    optimizer.step()
    assert all(bool((p == 1).all()) for p in model[0].parameters())
    assert model[1].weight.grad.flatten().tolist() == [2 * mean_rank(hvd) + 1] * 2


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_takes_one_path(hvd, device, line_search):
    w = parameter(device, 0, 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS([w], max_iter=5, line_search_fn=line_search))
    target = torch.tensor([hvd.rank() + 1.0, -2.0 * hvd.rank()], device=device)

    def closure():
        optimizer.zero_grad()
        loss = (w - target).square().sum()
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(4)]
    expected = torch.tensor([mean_rank(hvd) + 1, -2 * mean_rank(hvd)])
    torch.testing.assert_close(w.detach().cpu(), expected, atol=1e-4, rtol=1e-4)
    assert_equal_on_all_ranks(hvd, [w, torch.tensor(losses)])


def test_a_closure_with_sgd_returns_the_loss(hvd, device):
    w = parameter(device, 1)
    optimizer = hvd.DistributedOptimizer(sgd(w))

    def closure():
        optimizer.zero_grad()
        loss = w.sum() * (hvd.rank() + 1)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == hvd.rank() + 1
    assert w.item() == 1 - (mean_rank(hvd) + 1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_two_backward_passes_before_a_step(hvd, device, op):
    w = parameter(device, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w), op=getattr(hvd, op))
    for _ in range(2):
        optimizer.zero_grad()
        loss = w.sum()
        first, second = (1, 2) if hvd.rank() == 0 else (3, 4)
        (first * loss).backward(retain_graph=True)
        (second * loss).backward()
        optimizer.step()
        assert w.grad.item() == (5 if op == "Average" else 10)


@pytest.mark.ranks(2, 3)
def test_channels_last_on_one_rank(hvd, device, quiet):
    for kernel in (1, 3):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(4, 4, kernel).to(device)
        if hvd.rank() == 1:
            model = model.to(memory_format=torch.channels_last)
        optimizer = hvd.DistributedOptimizer(sgd(list(model.parameters()), foreach=True), model.named_parameters())
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.arange(4 * 25.0, device=device).view(1, 4, 5, 5) * (hvd.rank() + 1)
            model(x).square().sum().backward()
            grads = [p.grad.contiguous() for p in model.parameters()]
            assert_equal_on_all_ranks(hvd, grads)
            optimizer.step()
        assert_equal_on_all_ranks(hvd, [p.detach().contiguous() for p in model.parameters()])


@pytest.mark.ranks(2, 3)
def test_different_models_are_found_out_at_wrap(hvd, device):
    last = hvd.rank() == hvd.size() - 1
    tensors = [(f"layer{k}", parameter(device, 0)) for k in range(6 if last else 4)]
    with pytest.raises(hvd.HorovodInternalError, match="layer4"):
        hvd.DistributedOptimizer(sgd([t for _, t in tensors]), named_parameters=tensors)
    w = parameter(device, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w))
    give(w, hvd.rank())
    optimizer.step()
    assert w.item() == -mean_rank(hvd)


@pytest.mark.ranks(2, 3)
def test_the_same_parameters_are_wrapped_again_after_a_wrap_that_failed(hvd, device):
    last = hvd.rank() == hvd.size() - 1
    w = parameter(device, 0)
    with pytest.raises(hvd.HorovodInternalError) as kept:  # with its traceback, and in that the failed wrap
        hvd.DistributedOptimizer(sgd(w), named_parameters=[("this" if last else "that", w)])
    optimizer = hvd.DistributedOptimizer(sgd(w), named_parameters=[("w", w)])
    give(w, hvd.rank())
    optimizer.step()
    assert w.item() == -mean_rank(hvd)
    assert kept.value is not None


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("setting", "usual", "other"),
    [
        ("backward_passes_per_step", 1, 2),
        ("average_over_passes", False, True),
        ("clip_norm", None, 1.0),
        ("sparse_as_dense", False, True),
        ("overlap", "auto", False),
        ("gradient_predivide_factor", 1.0, 2.0),
        ("bucket_bytes", 1000, 2000),
    ],
)
def test_settings_that_differ_are_found_out_at_wrap(hvd, device, setting, usual, other):
    value = other if hvd.rank() == hvd.size() - 1 else usual
    said = "scale factors" if setting == "gradient_predivide_factor" else setting
    with pytest.raises(hvd.HorovodInternalError, match=said):
        hvd.DistributedOptimizer(sgd(parameter(device, 0)), **{setting: value})


@pytest.mark.parametrize("kind", ["number", "lists"])
def test_groups_of_which_half_is_unused_at_first(hvd, device, kind):
    tensors = [parameter(device, 0) for _ in range(5)]
    groups = 2 if kind == "number" else [tensors[:2], tensors[2:4]]
    optimizer = hvd.DistributedOptimizer(sgd(tensors), groups=groups)
    for used in (tensors[::2], tensors):
        optimizer.zero_grad()
        sum(t.sum() * (hvd.rank() + k) for k, t in enumerate(used)).backward()
        optimizer.step()
    assert [t.grad.item() for t in tensors] == [mean_rank(hvd) + k for k in range(5)]


@pytest.mark.ranks(1, 2)
def test_wrong_values_are_named_at_the_wrap(hvd, device):
    nan = float("nan")
    w = parameter(device, 0)
    for keyword, wrong in (
        ("gradient_predivide_factor", (0, -1.0, nan, float("inf"), "2")),
        ("clip_norm", (0, -1.0, nan, "1")),
        ("op", ("sum", 17, hvd.Max)),
        ("process_set", (3, [0], None)),
    ):
        for value in wrong:
            with pytest.raises((ValueError, TypeError), match=keyword):
                hvd.DistributedOptimizer(sgd(w), **{keyword: value})
    hvd.DistributedOptimizer(sgd(w), clip_norm=float("inf"))


def test_wrong_groups(hvd, device):
    w = parameter(device, 0)
    for wrong in (-1, [[w], [w]], [[1]], "a"):
        with pytest.raises(ValueError, match=r"groups|parameter can only"):
            hvd.DistributedOptimizer(sgd(w), groups=wrong)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedOptimizer(sgd(w), num_groups=1)


def test_predivide(hvd, device):
    w = parameter(device, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w), gradient_predivide_factor=4.0, groups=1)
    give(w, hvd.rank())
    optimizer.step()
    assert w.item() == -mean_rank(hvd)
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        hvd.DistributedOptimizer(sgd(w), gradient_predivide_factor=2.0, op=hvd.Sum)


def test_sum(hvd, device):
    w = parameter(device, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w), op=hvd.Sum)
    give(w, hvd.rank() + 1)
    optimizer.step()
    assert w.item() == -hvd.size() * (mean_rank(hvd) + 1)


def test_a_rank_without_a_gradient_takes_part(hvd, device):
    w = parameter(device, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w))
    if hvd.rank() == 0:
        give(w, 6)
    optimizer.step()
    assert w.item() == -6 / hvd.size()
    optimizer.zero_grad()
    optimizer.step()
    assert w.grad is None


@pytest.mark.ranks(1, 2, 3)
def test_join(hvd, device):
    """Rank 0 has one batch more than the others."""
    w = parameter(device, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w))
    batches = 3 if hvd.rank() == 0 else 2
    for batch in range(batches):
        optimizer.zero_grad()
        give(w, 4 if batch == 2 else hvd.rank())
        optimizer.step()
    if hvd.rank() == 0:
        assert w.grad.item() == pytest.approx(4 / hvd.size())
    last = hvd.join()
    assert last == 0 or hvd.size() == 1
    hvd.broadcast_parameters([("w", w)], root_rank=0)
    assert w.item() == pytest.approx(-2 * mean_rank(hvd) - 4 / hvd.size())


def test_mixed_types(hvd, device):
    types = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
    tensors = [torch.nn.Parameter(torch.zeros(3, dtype=t, device=device)) for t in types]
    optimizer = hvd.DistributedOptimizer(sgd(tensors))
    for _ in range(2):
        optimizer.zero_grad()
        for t in tensors:
            (t.sum() * hvd.rank()).real.backward()
        optimizer.step()
    assert all(bool((t == -2 * mean_rank(hvd)).all()) for t in tensors)


def test_freezing_and_unfreezing(hvd, device):
    a, b = parameter(device, 0), parameter(device, 0)
    b.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(sgd([a, b]), named_parameters=[("a", a), ("b", b)])
    give(a, hvd.rank())
    optimizer.step()
    b.requires_grad_(True)
    for _ in range(2):
        optimizer.zero_grad()
        ((a + b).sum() * hvd.rank()).backward()
        optimizer.step()
    assert a.item() == -3 * mean_rank(hvd) and b.item() == -2 * mean_rank(hvd)
    a.requires_grad_(False)
    optimizer.zero_grad()
    ((a + b).sum() * hvd.rank()).backward()
    optimizer.step()
    assert a.item() == -3 * mean_rank(hvd) and b.item() == -3 * mean_rank(hvd)
    a.requires_grad_(True)
    b.requires_grad_(False)
    optimizer.zero_grad()
    ((a + b).sum() * hvd.rank()).backward()
    optimizer.step()
    assert a.item() == -4 * mean_rank(hvd) and b.item() == -3 * mean_rank(hvd)


def test_everything_unfrozen_after_the_wrap(hvd, device):
    w = parameter(device, 0)
    w.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(sgd(w))
    optimizer.step()
    w.requires_grad_(True)
    give(w, hvd.rank())
    optimizer.step()
    assert w.item() == -mean_rank(hvd)


@pytest.mark.parametrize("op", ["Average", "Adasum"])
@pytest.mark.parametrize("how", ["add_param_group", "append", "replace", "unfreeze"])
def test_parameters_that_come_later(hvd, device, how, op):
    a, b = parameter(device, 0), parameter(device, 0)
    b.requires_grad_(how != "unfreeze")
    optimizer = hvd.DistributedOptimizer(sgd([a, b] if how == "unfreeze" else a), op=getattr(hvd, op))
    a.sum().backward()
    optimizer.step()
    if how == "add_param_group":
        optimizer.add_param_group({"params": [b], "lr": 2.0})
    elif how == "append":
        optimizer.param_groups[0]["params"].append(b)
    elif how == "replace":
        optimizer.param_groups[0]["params"] = [b]
    else:
        b.requires_grad_(True)
    for _ in range(2):
        optimizer.zero_grad()
        give(b, 3 if op == "Adasum" else 3 * hvd.rank())
        optimizer.step()
    mean = 3 if op == "Adasum" else 3 * mean_rank(hvd)
    assert a.item() == -1 and b.item() == pytest.approx(-2 * mean * (2 if how == "add_param_group" else 1))


def test_a_parameter_that_changes_its_shape(hvd, device):
    """A vocabulary grows: the same parameter with other data."""
    w = parameter(device, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w))
    for size in (1, 3, 2):
        w.data = torch.zeros(size, device=device)
        w.grad = None
        give(w, *[hvd.rank()] * size)
        optimizer.step()
        assert w.tolist() == [-mean_rank(hvd)] * size


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("make", ["SGD", "SparseAdam", "Adagrad"])
def test_sparse_gradients(hvd, device, as_dense, make):
    """The same as dense gradients of the joined batch."""
    def run(sparse, optimizer_of, rows_of, wrap):
        torch.manual_seed(0)
        table = torch.nn.Embedding(8, 2, sparse=sparse).to(device)
        optimizer = wrap(optimizer_of(table.parameters()))
        for step in range(3):
            optimizer.zero_grad()
            table(rows_of(step)).square().sum().backward()
            optimizer.step()
        return table.weight

    def rows(rank, step):
        return torch.tensor([0, rank, (rank + step) % 8], device=device)

    def joined(step):
        return torch.cat([rows(r, step) for r in range(hvd.size())])

    optimizers = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
        "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
        "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    }
    mine = run(
        True, optimizers[make], lambda step: rows(hvd.rank(), step),
        lambda o: hvd.DistributedOptimizer(o, op=hvd.Sum, sparse_as_dense=as_dense),
    )
    expected = run(True, optimizers[make], joined, lambda o: o)
    torch.testing.assert_close(mine, expected)
    assert mine.grad.is_sparse
    assert_equal_on_all_ranks(hvd, [mine])


def test_sparse_gradients_on_some_ranks_only(hvd, device):
    table = torch.nn.Embedding(4, 1, sparse=True).to(device)
    other = parameter(device, 0)
    torch.nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(sgd([table.weight, other]))
    for step in range(3):
        optimizer.zero_grad()
        loss = other.sum()
        if hvd.rank() == step % hvd.size():
            loss = loss + table(torch.tensor([step], device=device)).sum()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(
        table.weight.flatten(), torch.tensor([-1.0, -1.0, -1.0, 0.0], device=device) / hvd.size()
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_adasum_of_equal_and_orthogonal_steps(hvd, device, compression):
    w, v = parameter(device, 0, 0), parameter(device, 0, 0)
    optimizer = hvd.DistributedOptimizer(
        sgd([w, v]), op=hvd.Adasum, compression=getattr(hvd.Compression, compression)
    )
    give(w, 1, 2)
    give(v, *([1, 0] if hvd.rank() == 0 else [0, 1]))
    optimizer.step()
    torch.testing.assert_close(w.detach().cpu(), torch.tensor([-1.0, -2.0]))
    torch.testing.assert_close(v.detach().cpu(), torch.tensor([-1.0, -1.0]))
    with pytest.raises(AssertionError), optimizer.skip_synchronize():
        pass


@pytest.mark.ranks(2)
def test_adasum_takes_no_compression_but_casts(hvd, device):
    with pytest.raises(ValueError, match="Adasum through"):
        hvd.DistributedOptimizer(sgd(parameter(device, 0)), op=hvd.Adasum, compression=hvd.Compression.topk)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sum_of_what_16_bits_can_hold_is_exact(hvd, device, compression, dtype):
    w, v = (torch.nn.Parameter(torch.zeros(2, dtype=dtype, device=device)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(
        sgd([w, v]), op=hvd.Sum, compression=getattr(hvd.Compression, compression)
    )
    (w.sum() * 2.0 ** hvd.rank() + v.sum() * 49152).backward()
    optimizer.step()
    assert w.tolist() == [1 - 2 ** hvd.size()] * 2
    assert v.tolist() == [-49152 * hvd.size()] * 2


@pytest.mark.ranks(3)
def test_process_sets(hvd, device):
    hvd.shutdown()
    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    w = parameter(device, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w), process_set=pair)
    give(w, hvd.rank() + 1)
    optimizer.step()
    assert w.item() == (-2 if hvd.rank() in (0, 2) else -(hvd.rank() + 1))
    hvd.shutdown()
    hvd.init()


def test_adasum_after_shutdown_and_init(hvd, device):
    w = parameter(device, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w), op=hvd.Adasum)
    for _ in range(2):
        optimizer.zero_grad()
        give(w, 3)
        optimizer.step()
        hvd.shutdown()
        hvd.init()
    assert w.item() == pytest.approx(-6)


def test_after_shutdown_and_init(hvd, device):
    w = parameter(device, 0)
    optimizer = hvd.DistributedOptimizer(sgd(w))
    give(w, hvd.rank())
    optimizer.step()
    hvd.shutdown()
    hvd.init()
    assert w.grad.item() == mean_rank(hvd)
    for _ in range(2):
        optimizer.zero_grad()
        give(w, hvd.rank())
        optimizer.step()
    assert w.item() == -3 * mean_rank(hvd)


def test_wrapping_needs_init(hvd, device):
    w = parameter(device, 0)
    hvd.shutdown()
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        hvd.DistributedOptimizer(sgd(w))
    hvd.init()
