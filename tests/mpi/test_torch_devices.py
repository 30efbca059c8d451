"""The whole path with data that stays on a device: collectives, buckets and compressors on tensors, never on numpy.

Without a device, host tensors are made to stay tensors, which takes the same code from the public call to MPI.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from horo_lite.arrays import is_torch  # noqa: E402
from horo_lite.gradients import GradientBuckets  # noqa: E402

pytestmark = pytest.mark.ranks(2, 3)


@pytest.fixture(autouse=True)
def place(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the engine calls the device."""
    if device != "cpu":
        return device

    def stays(tensor: Any) -> tuple[Any, Any, bool]:
        target = tensor.detach()
        return target, target.contiguous().view(-1), target.is_contiguous()

    monkeypatch.setattr(sys.modules["horo_lite.arrays.flat"], "_flat_tensor", stays)
    for module in ("operations.base", "compressed"):
        monkeypatch.setattr(
            sys.modules[f"horo_lite.engine.{module}"], "device_name",
            lambda array: "torch-cpu" if is_torch(array) else "cpu",
        )
    return "torch-cpu"


def ranks_sum(size: int) -> int:
    """1 + 2 + ... + size."""
    return size * (size + 1) // 2


@pytest.mark.parametrize("elements", [1, 1000, 300_000])
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int32"])
def test_allreduce(hvd, device, name, elements):
    tensor = torch.full((elements,), hvd.rank() + 1, dtype=getattr(torch, name), device=device)
    total = hvd.allreduce(tensor, op=hvd.Sum)
    assert total.device == tensor.device and total.dtype == tensor.dtype
    assert (total == ranks_sum(hvd.size())).all()
    assert (tensor == hvd.rank() + 1).all()
    hvd.allreduce_(tensor, op=hvd.Max)
    assert (tensor == hvd.size()).all()


def test_average_scale_factors_and_layouts(hvd, device):
    whole = torch.full((4, 6), 6.0 * (hvd.rank() + 1), device=device)
    got = hvd.allreduce(whole.t()[1:4], op=hvd.Average, prescale_factor=0.5, postscale_factor=4.0)
    assert got.shape == (3, 4)
    assert torch.allclose(got, torch.full_like(got, 12.0 * ranks_sum(hvd.size()) / hvd.size()))


def test_grouped_allreduce_of_several_types(hvd, device):
    tensors = [torch.ones(3, device=device), torch.ones(70_000, device=device), torch.ones(2, device=device).int()]
    for result in hvd.grouped_allreduce(tensors, op=hvd.Sum):
        assert (result == hvd.size()).all()


def test_gather_scatter_broadcast_and_alltoall(hvd, device):
    size, rank = hvd.size(), hvd.rank()
    gathered = hvd.allgather(torch.full((rank + 1, 2), rank, device=device))
    assert gathered[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
    scattered = hvd.reducescatter(torch.arange(2 * size, device=device), op=hvd.Sum)
    assert scattered.tolist() == [size * 2 * rank, size * (2 * rank + 1)]
    received = hvd.broadcast(torch.full((100_000,), rank, device=device), size - 1)
    assert (received == size - 1).all()
    exchanged, rows = hvd.alltoall(torch.full((size,), rank, device=device), splits=torch.ones(size).int())
    assert exchanged.tolist() == list(range(size)) and rows.tolist() == [1] * size


def test_adasum_of_equal_gradients_is_the_gradient(hvd, device):
    gradient = torch.arange(1.0, 40.0, device=device)
    assert torch.allclose(hvd.allreduce(gradient, op=hvd.Adasum), gradient)


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "topk", "powersgd", "qsgd"])
def test_compressors(hvd, device, name):
    """Equal gradients of one value survive each of them."""
    method = getattr(hvd.Compression, name)
    compression = method(1.0) if name == "topk" else method
    gradient = torch.full((64, 8), 3.0, device=device)
    got = hvd.allreduce(gradient, compression=compression, name=f"device.{name}", op=hvd.Average)
    assert got.device == gradient.device
    assert torch.allclose(got, gradient, rtol=2e-2)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("compressed", [False, True])
def test_buckets(hvd, place, name, compressed):
    """Two buckets, one gradient that only the first rank has, and one that nobody has."""
    size, rank = hvd.size(), hvd.rank()
    buckets = GradientBuckets(
        [("a", (300,), name), ("b", (2, 5), name), ("c", (7,), name), ("d", (1,), name)],
        bucket_bytes=600, device=place, compression=hvd.Compression.bf16 if compressed else None,
    )
    for _ in range(3):
        assert all(is_torch(view) for view in buckets.views)
        for index in (2, 1, 0) if rank == 0 else (2, 0):
            buckets.views[index][:] = rank + 1
            buckets.ready(index)
        assert buckets.finish() == [True, True, True, False]
        for index, mean in ((0, ranks_sum(size) / size), (1, 1 / size), (2, ranks_sum(size) / size), (3, 0.0)):
            view = buckets.views[index]
            assert torch.allclose(view.float(), torch.full_like(view, mean).float(), rtol=1e-2), index
    buckets.close()


@pytest.fixture
def elsewhere(place: str, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A second device for parameters of one dimension; without one, they are said to lie on another."""
    if place == "torch-cpu":
        monkeypatch.setattr(
            sys.modules["horo_lite.torch.device_buckets"], "device_of", lambda p: place if p.dim() == 1 else "cpu"
        )
        return torch.device("cpu")
    return torch.device(place)


def parameters_on_two_devices(elsewhere: torch.device) -> dict[str, Any]:
    """The last is used by no rank, the one before it by the first alone."""
    return {
        "a": torch.nn.Parameter(torch.zeros(3, 2)),
        "b": torch.nn.Parameter(torch.zeros(4, device=elsewhere)),
        "c": torch.nn.Parameter(torch.zeros(5, 2)),
        "d": torch.nn.Parameter(torch.zeros(6, device=elsewhere)),
        "e": torch.nn.Parameter(torch.zeros(7, device=elsewhere)),
    }


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", ["none", "bf16", "int8"])
def test_an_optimizer_whose_parameters_lie_on_two_devices(hvd, elsewhere, grouped, name):
    size, weight = hvd.size(), float(hvd.rank() + 1)
    p = parameters_on_two_devices(elsewhere)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(p.values(), lr=1.0), named_parameters=p.items(),
        compression=getattr(hvd.Compression, name),
        groups=[[p["a"], p["b"]], [p["d"], p["e"]]] if grouped else None,
    )
    mean = ranks_sum(size) / size
    for step in (1, 2):
        optimizer.zero_grad()
        loss = weight * (p["a"].sum() + 2 * p["b"].sum().cpu() + 3 * p["c"].sum())
        if hvd.rank() == 0:
            loss = loss + 4 * p["d"].sum().cpu()
        loss.backward()
        optimizer.step()
        for key, gradient in {"a": mean, "b": 2 * mean, "c": 3 * mean, "d": 4 / size}.items():
            assert p[key].grad.device == p[key].device
            assert torch.allclose(p[key].grad, torch.full_like(p[key], gradient), rtol=1e-2), key
            assert torch.allclose(p[key].detach(), torch.full_like(p[key], -step * gradient), rtol=1e-2), key
        assert p["e"].grad is None


def test_adasum_on_two_devices(hvd, elsewhere):
    """Equal steps of all ranks are made once."""
    p = parameters_on_two_devices(elsewhere)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(p.values(), lr=1.0), named_parameters=p.items(), op=hvd.Adasum
    )
    (p["a"].sum() + 2 * p["b"].sum().cpu()).backward()
    optimizer.step()
    assert torch.allclose(p["a"].detach(), torch.full((3, 2), -1.0))
    assert torch.allclose(p["b"].detach().cpu(), torch.full((4,), -2.0))


def test_a_step_that_failed_on_one_of_two_devices_ends_on_both(hvd, elsewhere):
    from horo_lite.torch.device_buckets import DeviceBuckets, make_buckets

    named = list(parameters_on_two_devices(elsewhere).items())
    buckets = make_buckets(named, [{} for _ in named], None, "model", overlap="auto")
    assert isinstance(buckets, DeviceBuckets)
    buckets.ready(0)
    if hvd.rank() > 0:
        buckets.ready(1)
    where = "this rank" if hvd.rank() == 0 else "another rank"
    with pytest.raises(hvd.HorovodInternalError, match=f"failed midway on {where}"):
        buckets.finish(failed=hvd.rank() == 0)
    for index, view in enumerate(buckets.views):
        view[:] = float(index + hvd.rank())
        buckets.ready(index)
    assert buckets.finish() == [True] * len(named)
    for index, view in enumerate(buckets.views):
        assert view[0] == index + (hvd.size() - 1) / 2
    buckets.close()


def test_a_joined_rank_takes_part(hvd, device):
    if hvd.rank() == 0:
        total = hvd.allreduce(torch.ones(50_000, device=device), op=hvd.Sum, name="last")
        assert (total == 1).all()
    assert hvd.join() == 0


def test_tensors_reach_the_transport_as_tensors(hvd, device):
    if device != "cpu":
        pytest.skip("this is about the fixture that stands for a device")
    from horo_lite.transport.staging import StagedTransport

    seen: list[bool] = []
    send = StagedTransport.send

    def watch(self: Any, buffer: Any, *arguments: Any) -> Any:
        seen.append(is_torch(buffer))
        return send(self, buffer, *arguments)

    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(StagedTransport, "send", watch)
        hvd.allreduce(torch.ones(100_000, device=device), op=hvd.Sum)
    assert any(seen)
