"""Collectives on torch tensors: values, types, shapes, layouts, handles."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def ranks_sum(size):
    return size * (size + 1) / 2


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.complex64], ids=str)
def test_allreduce_keeps_type_and_input(hvd, device, dtype):
    own = torch.full((2, 3), hvd.rank() + 1, dtype=dtype, device=device)
    got = hvd.allreduce(own, op=hvd.Sum)
    assert got.dtype == dtype and got.shape == (2, 3) and got.device == own.device
    assert bool((got == int(ranks_sum(hvd.size()))).all())
    assert bool((own == hvd.rank() + 1).all())


def test_average_is_the_default(hvd, device):
    own = torch.tensor([float(hvd.rank()), 10.0], device=device)
    expected = torch.tensor([(hvd.size() - 1) / 2, 10.0], device=device)
    torch.testing.assert_close(hvd.allreduce(own), expected)
    torch.testing.assert_close(hvd.allreduce(own, average=True), expected)
    torch.testing.assert_close(hvd.allreduce(own, average=False), expected * hvd.size())
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(own, average=True, op=hvd.Sum)


def test_in_place_changes_the_callers_storage(hvd, device):
    base = torch.zeros(4, 6, device=device)
    strided = base.t()[1:4]
    strided.fill_(hvd.rank() + 1)
    assert hvd.allreduce_(strided, op=hvd.Sum) is strided
    assert base.sum().item() == 12 * ranks_sum(hvd.size())
    parameter = torch.nn.Parameter(torch.full((3,), float(hvd.rank()), device=device))
    hvd.broadcast_(parameter, root_rank=hvd.size() - 1)
    assert parameter.tolist() == [hvd.size() - 1.0] * 3
    assert parameter.requires_grad and parameter.is_leaf


def test_channels_last_on_one_rank(hvd, device):
    own = torch.arange(24.0, device=device).view(1, 2, 3, 4) * (hvd.rank() + 1)
    if hvd.rank() == hvd.size() - 1:
        own = own.contiguous(memory_format=torch.channels_last)
    expected = torch.arange(24.0, device=device).view(1, 2, 3, 4) * ranks_sum(hvd.size())
    torch.testing.assert_close(hvd.allreduce(own, op=hvd.Sum), expected, check_stride=False)


def test_scalars_and_empty_tensors(hvd, device):
    assert hvd.allreduce(torch.tensor(hvd.rank() + 1.0, device=device), op=hvd.Sum).item() == ranks_sum(hvd.size())
    assert hvd.allreduce(torch.empty(0, 3, device=device)).shape == (0, 3)
    gathered = hvd.allgather(torch.tensor(hvd.rank() + 1, device=device))
    assert gathered.tolist() == list(range(1, hvd.size() + 1))


def test_min_max_product_and_scale_factors(hvd, device):
    own = torch.tensor([hvd.rank() + 1.0, -hvd.rank()], device=device)
    assert hvd.allreduce(own, op=hvd.Min).tolist() == [1, -(hvd.size() - 1)]
    assert hvd.allreduce(own, op=hvd.Max).tolist() == [hvd.size(), 0]
    got = hvd.allreduce(own, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    torch.testing.assert_close(got, hvd.allreduce(own, op=hvd.Sum))


def test_handles_are_matched_by_name(hvd, device):
    names = ["a", "b"] if hvd.rank() == 0 else ["b", "a"]
    handles = {n: hvd.allreduce_async(torch.tensor([1.0 if n == "a" else 10.0], device=device), name=n, op=hvd.Sum)
               for n in names}
    results = {n: hvd.synchronize(handle) for n, handle in handles.items()}
    assert all(hvd.poll(handle) for handle in handles.values())
    assert results["a"].item() == hvd.size() and results["b"].item() == 10 * hvd.size()


def test_grouped_forms(hvd, device):
    own = [torch.full((k + 1,), float(hvd.rank()), device=device) for k in range(3)]
    for got, tensor in zip(hvd.grouped_allreduce(own, op=hvd.Sum), own, strict=True):
        assert got.tolist() == [sum(range(hvd.size()))] * len(tensor)
    gathered = hvd.grouped_allgather(own)
    assert [len(t) for t in gathered] == [hvd.size(), 2 * hvd.size(), 3 * hvd.size()]
    assert hvd.synchronize(hvd.grouped_allreduce_async_(own, op=hvd.Sum))[0] is own[0]


def test_groups_may_be_generators(hvd, device):
    def own(requires_grad=False):
        return (torch.ones(2, device=device, requires_grad=requires_grad) for _ in range(3))

    for requires_grad in (False, True):
        reduced = hvd.grouped_allreduce(own(requires_grad), op=hvd.Sum)
        assert [t.tolist() for t in reduced] == [[hvd.size()] * 2] * 3
        assert [len(t) for t in hvd.grouped_allgather(own(requires_grad))] == [2 * hvd.size()] * 3
        assert len(hvd.grouped_reducescatter(own(requires_grad))) == 3
    assert [t.tolist() for t in hvd.grouped_allreduce_(own(), op=hvd.Sum)] == [[hvd.size()] * 2] * 3


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_types_that_torch_only_stores_are_moved(hvd, device, dtype):
    rank, size = hvd.rank(), hvd.size()

    def own(rank):
        return torch.tensor([[rank, 3.0]], device=device).to(dtype)

    assert hvd.allgather(own(rank)).float().tolist() == [[r, 3] for r in range(size)]
    assert hvd.broadcast(own(rank), size - 1).float().tolist() == [[size - 1, 3]]
    assert hvd.broadcast_(own(rank).T, size - 1).float().tolist() == [[size - 1], [3]]
    assert hvd.alltoall(torch.cat([own(10 * rank + r).float() for r in range(size)]).to(dtype)).dtype == dtype
    if dtype != torch.uint16:
        for reduce in (hvd.allreduce, hvd.reducescatter):
            with pytest.raises(TypeError, match=str(dtype).removeprefix("torch.")):
                reduce(own(rank))


def test_ragged_allgather(hvd, device):
    own = torch.full((hvd.rank() + 1, 2), float(hvd.rank()), device=device)
    got = hvd.allgather(own)
    expected = [float(r) for r in range(hvd.size()) for _ in range(r + 1)]
    assert got[:, 0].tolist() == expected and got.shape[1] == 2


def test_alltoall(hvd, device):
    size, rank = hvd.size(), hvd.rank()
    own = torch.arange(size, device=device) + 10 * rank
    assert hvd.alltoall(own).tolist() == [10 * r + rank for r in range(size)]
    splits = torch.tensor([r + 1 for r in range(size)], dtype=torch.int32)
    rows = torch.full((int(splits.sum()),), rank, device=device)
    got, received = hvd.alltoall(rows, splits=splits)
    assert received.dtype == torch.int32 and received.tolist() == [rank + 1] * size
    assert got.tolist() == [r for r in range(size) for _ in range(rank + 1)]
    output, received = hvd.synchronize(hvd.alltoall_async(own))
    assert received.tolist() == [1] * size and output.shape == (size,)


def test_reducescatter(hvd, device):
    size, rank = hvd.size(), hvd.rank()
    own = torch.arange(2.0 * size + 1, device=device) * (rank + 1)
    whole = torch.arange(2.0 * size + 1, device=device) * ranks_sum(size)
    mine = whole[: 3 if rank == 0 else 0] if rank == 0 else whole[3 + 2 * (rank - 1) :][:2]
    torch.testing.assert_close(hvd.reducescatter(own, op=hvd.Sum), mine)
    torch.testing.assert_close(hvd.reducescatter(own, op=hvd.Sum, compression=hvd.Compression.fp16), mine)


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_sparse_allreduce(hvd, device, op):
    rank, size = hvd.rank(), hvd.size()
    own = torch.sparse_coo_tensor([[0, rank]], [[1.0, 2.0], [3.0, 4.0]], (size + 1, 2), device=device)
    handle = hvd.sparse_allreduce_async(own, name="s", op=getattr(hvd, op))
    dense = hvd.synchronize(handle).to_dense()
    assert handle().is_sparse
    expected = torch.zeros(size + 1, 2, device=device)
    for r in range(size):
        expected[0] += torch.tensor([1.0, 2.0], device=device)
        expected[r] += torch.tensor([3.0, 4.0], device=device)
    torch.testing.assert_close(dense, expected / (size if op == "Average" else 1))


def test_compression_of_one_call(hvd, device):
    own = torch.full((5,), 40000.0, device=device)
    assert hvd.allreduce(own, compression=hvd.Compression.fp16).tolist() == [40000.0] * 5
    assert hvd.allreduce(own, compression=hvd.Compression.none).tolist() == [40000.0] * 5


@pytest.mark.ranks(2, 3)
def test_a_disagreement_raises_everywhere_and_leaves_the_engine_usable(hvd, device):
    with pytest.raises(hvd.HorovodInternalError, match=r"rank"):
        hvd.allreduce(torch.zeros(4 + hvd.rank(), device=device), name="differs")
    assert hvd.allreduce(torch.ones(1, device=device), op=hvd.Sum).item() == hvd.size()


def test_objects(hvd):
    assert hvd.broadcast_object({"epoch": 7} if hvd.rank() == 0 else None) == {"epoch": 7}
    assert hvd.broadcast_object(None, root_rank=hvd.size() - 1) is None
    assert len(hvd.broadcast_object(b"x" * 5_000_000 if hvd.rank() == 0 else 0)) == 5_000_000
    assert hvd.allgather_object(("r", hvd.rank())) == [("r", r) for r in range(hvd.size())]
