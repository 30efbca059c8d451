"""All-gather, broadcast, all-to-all, reduce-scatter, barrier and objects, on numpy arrays."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

TYPES = [
    np.bool_, np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64, np.float16, ml_dtypes.bfloat16, np.float32,
    np.float64, np.complex64, np.complex128, np.uint32, np.uint64, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
]


def row(rank: int, columns: int = 3, dtype: type = np.float64) -> np.ndarray:
    """What rank r sends in each row: values that only it has."""
    return (np.arange(columns) % 2 + rank).astype(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.__name__)
def test_every_type_is_moved_as_it_is(hvd, dtype):
    rank, size = hvd.rank(), hvd.size()
    gathered = hvd.allgather(np.stack([row(rank, dtype=dtype)] * 2))
    assert gathered.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(gathered, np.repeat([row(r, dtype=dtype) for r in range(size)], 2, axis=0))
    for root in range(size):
        got = hvd.broadcast(row(rank, dtype=dtype), root)
        assert got.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(got, row(root, dtype=dtype))
    exchanged = hvd.alltoall(np.stack([row(10 * rank + r, dtype=dtype) for r in range(size)]))
    np.testing.assert_array_equal(exchanged, [row(10 * r + rank, dtype=dtype) for r in range(size)])


def test_gathered_rows_may_differ(hvd):
    rank, size = hvd.rank(), hvd.size()
    rows = [2, 1, 3, 0][:size]
    got = hvd.allgather(np.full((rows[rank], 3), rank))
    np.testing.assert_array_equal(got, np.repeat(np.arange(size), rows)[:, None] * np.ones((1, 3), int))


def test_rows_that_change_from_call_to_call_under_one_name(hvd):
    rank, size = hvd.rank(), hvd.size()
    for step in range(12):
        rows = [(step * (r + 1)) % 4 for r in range(size)]
        got = hvd.allgather(np.full((rows[rank], 2), 10.0 * step + rank), name="ragged")
        np.testing.assert_array_equal(got[:, 1], 10.0 * step + np.repeat(np.arange(size), rows))


def test_scalars_gather_to_one_element_each(hvd):
    got = hvd.allgather(np.array(hvd.rank() + 1))
    assert got.tolist() == list(range(1, hvd.size() + 1))
    assert hvd.allgather(hvd.rank() + 1).tolist() == got.tolist()


@pytest.mark.parametrize("foreign", ["all ranks", "one rank"])
@pytest.mark.parametrize("dtype", ["i2", "f4", "f8", "c8"])
def test_arrays_of_either_byte_order_come_back_in_the_machines(hvd, dtype, foreign):
    rank, size = hvd.rank(), hvd.size()
    native = np.dtype(dtype)
    own = (np.arange(2 * size) + rank).astype(native)
    total = (np.arange(2 * size) * size + size * (size - 1) // 2).astype(native)
    if foreign == "all ranks" or rank == size - 1:
        own = own.astype(native.newbyteorder("S"))
    parts = {
        "allgather": (hvd.allgather(own), np.concatenate([np.arange(2 * size) + r for r in range(size)])),
        "alltoall": (hvd.alltoall(own), np.concatenate([np.arange(2 * rank, 2 * rank + 2) + r for r in range(size)])),
        "broadcast": (hvd.broadcast(own, size - 1), np.arange(2 * size) + size - 1),
        "allreduce": (hvd.allreduce(own, op=hvd.Sum), total),
        "grouped": (hvd.grouped_allreduce([own, own[:1]], op=hvd.Sum)[0], total),
        "reducescatter": (hvd.reducescatter(own, op=hvd.Sum), total[2 * rank : 2 * rank + 2]),
    }
    for name, (got, want) in parts.items():
        assert got.dtype == native and got.dtype.isnative, name
        np.testing.assert_array_equal(got, want.astype(native), err_msg=name)
    hvd.allreduce_(own, op=hvd.Sum)
    np.testing.assert_array_equal(own, total)


def test_gathered_arrays_may_be_strided_or_empty(hvd):
    rank, size = hvd.rank(), hvd.size()
    wide = np.arange(12).reshape(3, 4) + 100 * rank
    got = hvd.allgather(wide[:, ::2])
    np.testing.assert_array_equal(got, np.concatenate([wide[:, ::2] + 100 * (r - rank) for r in range(size)]))
    assert hvd.allgather(np.empty((0, 5))).shape == (0, 5)
    assert hvd.allgather(np.empty((2, 0))).shape == (2 * size, 0)


def test_a_group_is_gathered_as_one(hvd):
    rank, size = hvd.rank(), hvd.size()
    many = hvd.grouped_allgather([np.full(rank + 1, rank), np.full((1, 2), rank, np.float32), np.array(rank)])
    assert many[0].tolist() == [r for r in range(size) for _ in range(r + 1)]
    assert many[1].tolist() == [[r, r] for r in range(size)]
    assert many[2].tolist() == list(range(size))
    assert many[1].dtype == np.float32
    assert hvd.grouped_allgather([]) == []


@pytest.mark.parametrize("elements", [0, 1, 1000, 200_000])
def test_broadcast_of_any_size_from_any_root(hvd, elements):
    for root in range(hvd.size()):
        own = np.arange(elements, dtype=np.float32) + 1000 * hvd.rank()
        got = hvd.broadcast(own, root)
        np.testing.assert_array_equal(got, np.arange(elements, dtype=np.float32) + 1000 * root)
        np.testing.assert_array_equal(own, np.arange(elements, dtype=np.float32) + 1000 * hvd.rank())
        assert hvd.broadcast_(own, root) is own
        np.testing.assert_array_equal(own, got)


def test_broadcast_in_place_reaches_strided_and_0d_storage(hvd):
    root = hvd.size() - 1
    whole = np.full((4, 4), -1.0)
    whole[::2, ::2] = hvd.rank()
    hvd.broadcast_(whole[::2, ::2], root)
    assert whole.sum() == 4 * root - 12
    scalar = np.array(hvd.rank())
    hvd.broadcast_(scalar, root)
    assert (scalar.shape, int(scalar)) == ((), root)


def test_alltoall_with_splits(hvd):
    rank, size = hvd.rank(), hvd.size()
    splits = [(rank + r) % 3 for r in range(size)]
    own = np.concatenate([np.full((splits[r], 2), 10 * rank + r) for r in range(size)])
    got, received = hvd.alltoall(own, splits=splits)
    assert received.dtype == np.int32
    assert received.tolist() == [(r + rank) % 3 for r in range(size)]
    np.testing.assert_array_equal(
        got, np.concatenate([np.full(((r + rank) % 3, 2), 10 * r + rank) for r in range(size)])
    )
    got, received = hvd.alltoall(np.empty((0, 2)), splits=np.zeros(size, np.int32))
    assert (got.shape, received.tolist()) == ((0, 2), [0] * size)


def test_alltoall_may_leave_rows_behind(hvd):
    size = hvd.size()
    got, received = hvd.alltoall(np.arange(size + 5), splits=[1] * size)
    assert got.tolist() == [hvd.rank()] * size
    assert received.tolist() == [1] * size


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 7, 12])
@pytest.mark.parametrize("name", ["float32", "float16", "int32"])
def test_reducescatter_gives_the_first_ranks_a_row_more(hvd, rows, name):
    rank, size = hvd.rank(), hvd.size()
    counts = [rows // size + (r < rows % size) for r in range(size)]
    own = (np.arange(rows * 3).reshape(rows, 3) % 11 + rank).astype(name)
    whole = (np.arange(rows * 3).reshape(rows, 3) % 11) * size + sum(range(size))
    start = sum(counts[:rank])
    got = hvd.reducescatter(own, op=hvd.Sum)
    assert got.dtype == np.dtype(name)
    np.testing.assert_array_equal(got, whole[start : start + counts[rank]].astype(name))
    mean = hvd.reducescatter(own, postscale_factor=2.0)
    wanted = whole[start : start + counts[rank]] * 2 / size
    if name == "int32":
        wanted = np.trunc(wanted)
    np.testing.assert_allclose(mean, wanted.astype(name), rtol=1e-3)


def test_a_group_is_reduce_scattered_as_one(hvd):
    size = hvd.size()
    first, second = hvd.grouped_reducescatter([np.ones((size, 2)), np.arange(2.0 * size)], op=hvd.Sum)
    assert first.tolist() == [[size, size]]
    assert second.tolist() == [2.0 * hvd.rank() * size, (2.0 * hvd.rank() + 1) * size]


def test_objects_of_many_kinds(hvd):
    size, rank = hvd.size(), hvd.rank()
    for root in range(size):
        for value in ({"epoch": 7 + rank, "rank": rank}, None, rank, "é" * (rank + 1), lambda: rank, [], b""):
            got = hvd.broadcast_object(value, root_rank=root)
            if callable(got):
                assert got() == root
            elif isinstance(got, dict):
                assert got == {"epoch": 7 + root, "rank": root}
            elif isinstance(got, str):
                assert got == "é" * (root + 1)
            elif isinstance(got, int):
                assert got == root
    everyones = hvd.allgather_object({"rank": rank, "text": "x" * rank})
    assert everyones == [{"rank": r, "text": "x" * r} for r in range(size)]
    assert hvd.allgather_object(None) == [None] * size


@pytest.mark.ranks(2, 3)
def test_an_object_of_five_megabytes(hvd):
    content = bytes(range(256)) * (5 * 4096)
    got = hvd.broadcast_object(content if hvd.rank() == 1 else None, root_rank=1, name="large")
    assert got == content


def test_barrier_and_placement(hvd):
    for _ in range(3):
        hvd.barrier()
    assert hvd.local_size() == hvd.size()
    assert hvd.local_rank() == hvd.rank()
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()
    assert sorted(hvd.allgather(hvd.rank()).tolist()) == list(range(hvd.size()))
