"""Tensors and gradients between two ranks, and a model cut over them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_around_the_ring(hvd, device, dtype):
    """Everybody sends first; two messages with one tag arrive in order."""
    to, source = (hvd.rank() + 1) % hvd.size(), (hvd.rank() - 1) % hvd.size()
    for k in range(2):
        tensor = torch.full((2, 3), hvd.rank() + 10 * k, dtype=dtype, device=device)
        hvd.send(tensor.t(), to)
        tensor.zero_()  # it has been copied
    for k in range(2):
        got = hvd.recv(torch.empty(3, 2, dtype=dtype, device=device), source)
        assert got.dtype == dtype and bool((got == source + 10 * k).all())


@pytest.mark.ranks(2)
def test_tags_keep_messages_apart(hvd, device):
    if hvd.rank() == 0:
        for tag in (0, 1):
            hvd.send(torch.tensor(float(tag), device=device), 1, tag=tag)
    else:
        assert [hvd.recv(torch.tensor(0.0, device=device), 0, tag=tag).item() for tag in (1, 0)] == [1, 0]


@pytest.mark.ranks(2)
def test_the_gradient_comes_back(hvd, device):
    x = torch.full((3,), 2.0, device=device, requires_grad=True)
    for _ in range(2):
        x.grad = None
        if hvd.rank() == 0:
            token = hvd.send(x * 3, 1, tag=5)
            token.backward()
            assert x.grad.tolist() == [3 * 2 * 6.0] * 3
        else:
            hvd.recv(torch.empty(3, device=device), 0, tag=5).square().sum().backward()
    with torch.no_grad():
        if hvd.rank() == 0:
            assert not hvd.send(x, 1).requires_grad
        else:
            assert not hvd.recv(torch.empty(3, device=device), 0).requires_grad


@pytest.mark.ranks(2)
@pytest.mark.parametrize("elements", [0, 4, 100_000])
def test_something_else_was_sent_and_then_what_was_expected(hvd, device, elements):
    if hvd.rank() == 0:
        hvd.send(torch.zeros(elements, device=device), 1, tag=9)
        hvd.send(torch.ones(3, device=device), 1, tag=9)
    else:
        with pytest.raises(hvd.DisagreementError, match=rf"expected float32 \[3\], but float32 \[{elements}\]"):
            hvd.recv(torch.zeros(3, device=device), 0, tag=9)
        assert hvd.recv(torch.zeros(3, device=device), 0, tag=9).tolist() == [1.0] * 3
    hvd.barrier()
    for wrong in (hvd.rank(), -1, 2):
        with pytest.raises(ValueError, match="expected another rank"):
            hvd.send(torch.zeros(1), wrong)


def stages():
    torch.manual_seed(0)
    make = lambda a, b: torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.Tanh()).double()  # noqa: E731
    return make(4, 6), make(6, 2)


@pytest.mark.ranks(4)
@pytest.mark.limit(90)
def test_two_stages_in_two_replicas_equal_one_process(hvd, device):
    hvd.shutdown()
    sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])]
    hvd.init(process_sets=sets)
    stage, replica = divmod(hvd.rank(), 2)
    part = stages()[stage].to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(part.parameters(), lr=0.1), part.named_parameters(), process_set=sets[stage],
        backward_passes_per_step=3 if stage else 1,
    )
    x = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        if stage == 0:
            tokens = [hvd.send(part(micro), 2 + replica, tag=m) for m, micro in enumerate(x[replica])]
            torch.autograd.backward(tokens)
        else:
            for m in range(3):
                like = torch.empty(5, 6, dtype=torch.float64, device=device)
                part(hvd.recv(like, replica, tag=m)).square().mean().backward()
        optimizer.step()
    alone = torch.nn.Sequential(*stages()).to(device)
    reference = torch.optim.Adam(alone.parameters(), lr=0.1)
    for _ in range(3):
        reference.zero_grad()
        sum(alone(micro).square().mean() / 2 for replica in x for micro in replica).backward()
        reference.step()
    for a, b in zip(part.parameters(), alone[stage].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    hvd.shutdown()
    hvd.init()
