"""Gradients through collectives follow Horovod's rules (the table in docs/torch.md)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture
def x(hvd, device):
    return torch.full((2,), hvd.rank() + 1.0, device=device, requires_grad=True)


def weighted(tensor, rank):
    """A loss whose gradient is rank + 1 everywhere."""
    return (tensor * (rank + 1)).sum()


def mean_weight(hvd):
    return (hvd.size() + 1) / 2


def test_allreduce(hvd, x):
    weighted(hvd.allreduce(x), hvd.rank()).backward()
    assert x.grad.tolist() == [mean_weight(hvd)] * 2
    x.grad = None
    weighted(hvd.allreduce(x, op=hvd.Sum, name="named"), hvd.rank()).backward()
    assert x.grad.tolist() == [mean_weight(hvd) * hvd.size()] * 2


def test_the_scale_factors_apply_backward_too(hvd, x):
    weighted(hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0, postscale_factor=2.0), hvd.rank()).backward()
    assert x.grad.tolist() == [6 * mean_weight(hvd) * hvd.size()] * 2


def test_grouped_allreduce(hvd, x, device):
    y = torch.ones(3, device=device, requires_grad=True)
    plain = torch.ones(1, device=device)
    a, _, c = hvd.grouped_allreduce([x, y, plain], op=hvd.Sum)
    weighted(a, hvd.rank()).backward()
    assert x.grad.tolist() == [mean_weight(hvd) * hvd.size()] * 2
    assert y.grad.tolist() == [0, 0, 0]
    assert c.tolist() == [hvd.size()]


def test_allgather_of_different_lengths(hvd, device):
    rank, size = hvd.rank(), hvd.size()
    x = torch.ones(rank + 1, 2, device=device, requires_grad=True)
    rows = hvd.allgather(x)
    weighted(rows * torch.arange(len(rows), device=device)[:, None], rank).backward()
    first = sum(range(1, rank + 1))
    expected = [[(first + k) * mean_weight(hvd)] * 2 for k in range(rank + 1)]
    torch.testing.assert_close(x.grad, torch.tensor(expected, device=device))
    scalar = torch.tensor(1.0, device=device, requires_grad=True)
    hvd.allgather(scalar).sum().backward()
    assert scalar.grad.item() == 1.0
    assert size == len(hvd.allgather(scalar))


def test_broadcast(hvd, x):
    weighted(hvd.broadcast(x, root_rank=0), hvd.rank()).backward()
    assert x.grad.tolist() == [mean_weight(hvd) if hvd.rank() == 0 else 0.0] * 2


def test_alltoall(hvd, device):
    rank, size = hvd.rank(), hvd.size()
    splits = [r + 1 for r in range(size)]
    x = torch.ones(sum(splits), device=device, requires_grad=True)
    output, received = hvd.alltoall(x, splits=splits)
    assert received.tolist() == [rank + 1] * size
    weighted(output, rank).backward()
    assert x.grad.tolist() == [float(r + 1) for r in range(size) for _ in range(r + 1)]


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_reducescatter(hvd, device, op):
    rank, size = hvd.rank(), hvd.size()
    x = torch.ones(size, device=device, requires_grad=True)
    weighted(hvd.reducescatter(x, op=getattr(hvd, op)), rank).backward()
    factor = size if op == "Sum" else 1
    assert x.grad.tolist() == [factor * (r + 1.0) for r in range(size)]


def test_compressed_allreduce(hvd, x):
    weighted(hvd.allreduce(x, compression=hvd.Compression.fp16), hvd.rank()).backward()
    assert x.grad.tolist() == [mean_weight(hvd)] * 2


def test_nothing_is_recorded_without_need(hvd, device):
    own = torch.ones(2, device=device)
    assert not hvd.allreduce(own).requires_grad
    with torch.no_grad():
        assert not hvd.allreduce(own.requires_grad_()).requires_grad
    assert hvd.allreduce(own).requires_grad
