"""All-reduce of numpy arrays: every operation, type and size; factors; groups; in place; layouts."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from horo_lite.compression import Compression
from horo_lite.gradients import GradientBuckets
from horo_lite.interfaces import Reduced, SumRequest

INTEGERS = ("uint8", "int8", "uint16", "int16", "int32", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
SIZES = (0, 1, 2, 3, 5, 7, 63, 64, 1023, 40_003)


def dtype_of(name: str) -> Any:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def ranks_values(elements: int, size: int) -> list[np.ndarray]:
    """Small whole numbers, so that every type holds every sum exactly."""
    return [(np.arange(elements) * (rank + 1)) % 5 + rank for rank in range(size)]


def supported(name: str, op_name: str) -> bool:
    if name == "bool":
        return op_name not in ("Average", "Adasum")
    if name in COMPLEX:
        return op_name in ("Sum", "Average")
    return not (name in INTEGERS and op_name == "Adasum")


def expected(values: list[np.ndarray], name: str, op_name: str) -> np.ndarray:
    stacked = np.stack(values)
    if name == "bool":
        truth = stacked.astype(bool)
        return truth.any(0) if op_name in ("Sum", "Max") else truth.all(0)
    if op_name == "Average":
        total = stacked.sum(0)
        return np.trunc(total / len(values)) if name in INTEGERS else total / len(values)
    return {"Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}[op_name](stacked, 0)


def equal_on_all_ranks(hvd: Any, array: np.ndarray) -> bool:
    return len(set(hvd.allgather_object(array.tobytes()))) == 1


@pytest.mark.parametrize("op_name", ["Average", "Sum", "Min", "Max", "Product"])
@pytest.mark.parametrize("name", ["bool", *INTEGERS, *FLOATS, *COMPLEX])
@pytest.mark.ranks(1, 3)
def test_every_operation_and_type_at_sizes_that_do_not_divide(hvd, name, op_name):
    op = getattr(hvd, op_name)
    dtype = dtype_of(name)
    for elements in SIZES:
        values = ranks_values(elements, hvd.size())
        own = values[hvd.rank()].astype(dtype)
        if not supported(name, op_name):
            with pytest.raises(TypeError, match=name):
                hvd.allreduce(own, op=op)
            continue
        got = hvd.allreduce(own, op=op)
        assert got.dtype == dtype
        assert got.shape == (elements,)
        np.testing.assert_array_equal(got, expected(values, name, op_name).astype(dtype))
        np.testing.assert_array_equal(own, values[hvd.rank()].astype(dtype), "the input has changed")


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", FLOATS)
def test_rough_values_are_bitwise_equal_on_all_ranks_and_from_run_to_run(hvd, name):
    generator = np.random.default_rng(hvd.rank())
    for elements in (1, 5, 1023, 70_001):
        rough = generator.standard_normal(elements) * 10.0 ** generator.uniform(-3, 3, elements)
        own = rough.astype(dtype_of(name))
        for op in (hvd.Sum, hvd.Average, hvd.Adasum):
            got = hvd.allreduce(own, op=op)
            assert equal_on_all_ranks(hvd, got)
            assert got.tobytes() == hvd.allreduce(own, op=op).tobytes()


def test_sixteen_bit_floats_are_added_in_float32_and_rounded_once(hvd):
    ones = hvd.size() - 1
    for dtype, large in ((np.float16, 2048), (ml_dtypes.bfloat16, 256)):
        for elements in (1, 3, 1000):
            own = np.full(elements, large if hvd.rank() == 0 else 1, dtype)
            got = hvd.allreduce(own, op=hvd.Sum)
            assert got.dtype == np.dtype(dtype)
            np.testing.assert_array_equal(got, np.full(elements, large + ones).astype(dtype))


@pytest.mark.ranks(2)
def test_bfloat16_and_float16_by_hand(hvd):
    own = np.array([1, 0, 2], ml_dtypes.bfloat16)
    assert hvd.allreduce(own, op=hvd.Sum).astype(float).tolist() == [2, 0, 4]
    mean = hvd.allreduce(np.array([hvd.rank() + 1], np.float16))
    assert mean.dtype == np.float16
    assert mean.tolist() == [1.5]
    assert hvd.allreduce(np.array([40000], np.float16)).tolist() == [40000]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "left", "right", "mean"),
    [
        ("uint8", 200, 200, 200), ("int8", 120, 100, 110), ("int8", -128, -128, -128), ("uint8", 255, 254, 254),
        ("int64", -1, -2, -1), ("int64", 1, 2, 1), ("int64", 2**62, 2**62, 2**62), ("int64", -(2**63), 2**63 - 1, 0),
        ("int32", 2**31 - 1, 2**31 - 1, 2**31 - 1), ("int16", -7, 2, -2),
    ],
)
def test_an_integer_average_never_wraps_and_goes_toward_zero(hvd, name, left, right, mean):
    own = np.array([left, right][hvd.rank()], name)
    got = hvd.allreduce(own)
    assert (got.dtype, got.shape, int(got)) == (np.dtype(name), (), mean)


@pytest.mark.ranks(2)
def test_an_integer_sum_wraps_as_its_type_does(hvd):
    assert hvd.allreduce(np.array([200], np.uint8), op=hvd.Sum).tolist() == [144]
    assert hvd.allreduce(np.array([100], np.int8), op=hvd.Sum).tolist() == [-56]


def test_scalars_numbers_lists_and_ones(hvd):
    size = hvd.size()
    got = hvd.allreduce(np.array(hvd.rank() + 1.0), op=hvd.Sum)
    assert (got.shape, float(got)) == ((), size * (size + 1) / 2)
    assert float(hvd.allreduce(hvd.rank())) == (size - 1) // 2
    assert float(hvd.allreduce(float(hvd.rank()))) == (size - 1) / 2
    assert hvd.allreduce([1.0, 2.0], op=hvd.Sum).tolist() == [size, 2 * size]
    assert hvd.allreduce(np.ones((1, 2, 2)), op=hvd.Sum).tolist() == [[[size, size], [size, size]]]
    assert hvd.allreduce(np.empty((0, 3))).shape == (0, 3)


def test_allreduce_leaves_its_input_and_the_underscore_changes_it(hvd):
    size = hvd.size()
    mine = np.array([7371.0 - 31 * hvd.rank()])
    total = 7371.0 * size - 31 * size * (size - 1) / 2
    assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [total]
    assert mine.tolist() == [7371.0 - 31 * hvd.rank()]
    same = hvd.allreduce_(mine, op=hvd.Sum)
    assert same is mine
    assert mine.tolist() == [total]


def test_in_place_reaches_the_storage_behind_strides(hvd):
    whole = np.zeros((4, 6))
    view = whole[::2, 1::2]
    view[:] = hvd.rank() + 1
    hvd.allreduce_(view, op=hvd.Sum)
    total = hvd.size() * (hvd.size() + 1) / 2
    assert (whole[::2, 1::2] == total).all()
    assert whole.sum() == view.size * total
    scalar = np.array(hvd.rank() + 1.0)
    hvd.allreduce_(scalar, op=hvd.Sum)
    assert float(scalar) == total


def test_layouts_may_differ_between_ranks(hvd):
    logical = np.arange(12.0).reshape(3, 4) + hvd.rank()
    order = "F" if hvd.rank() % 2 else "C"
    laid_out = [
        np.array(logical, order=order),
        np.ascontiguousarray(logical.T).T if hvd.rank() % 2 else logical,
        np.repeat(logical, 2, axis=1)[:, ::2] if hvd.rank() % 2 else logical,
        logical.astype(">f8") if hvd.rank() % 2 else logical,
    ]
    for array in laid_out:
        got = hvd.allreduce(array, op=hvd.Average)
        np.testing.assert_array_equal(got, np.arange(12.0).reshape(3, 4) + (hvd.size() - 1) / 2)


def test_prescale_and_postscale(hvd):
    size = hvd.size()
    own = np.full(5, hvd.rank() + 1.0, np.float32)
    total = size * (size + 1) / 2
    for before, after in itertools.product((1.0, 0.5, 3.0), (1.0, 0.25)):
        got = hvd.allreduce(own, op=hvd.Sum, prescale_factor=before, postscale_factor=after)
        np.testing.assert_allclose(got, np.full(5, before * total * after), rtol=1e-6)
        got = hvd.allreduce(own, prescale_factor=before, postscale_factor=after)
        np.testing.assert_allclose(got, np.full(5, before * total * after / size), rtol=1e-6)
    largest = hvd.allreduce(own, op=hvd.Max, prescale_factor=2.0, postscale_factor=0.5)
    assert largest.tolist() == [size] * 5
    half = hvd.allreduce(np.full(3, 60000, np.float16), op=hvd.Sum, prescale_factor=1 / 4)
    np.testing.assert_array_equal(half, np.full(3, 15000 * size).astype(np.float16))
    whole = hvd.allreduce(np.array([10], np.int32), op=hvd.Sum, prescale_factor=0.5, postscale_factor=0.5)
    assert whole.tolist() == [int(5 * size * 0.5)]


def test_average_keyword_of_horovod(hvd):
    own = np.array([2.0 * hvd.rank()])
    assert hvd.allreduce(own, average=False).tolist() == [float(hvd.size() * (hvd.size() - 1))]
    assert hvd.allreduce(own, average=True).tolist() == [float(hvd.size() - 1)]
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(own, average=True, op=hvd.Sum)
    assert hvd.allreduce(own).tolist() == [float(hvd.size() - 1)]


def test_groups_of_many_types_and_sizes(hvd):
    size, rank = hvd.size(), hvd.rank()
    shapes = [(), (3,), (2, 5), (0,), (70_000,), (1, 1, 7)]
    names = ["float32", "float16", "int64", "float32", "float64", "float32"]
    tensors = [
        np.full(shape, rank + place + 1, name) for place, (shape, name) in enumerate(zip(shapes, names, strict=True))
    ]
    results = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    assert isinstance(results, list)
    for place, (result, tensor) in enumerate(zip(results, tensors, strict=True)):
        assert (result.shape, result.dtype) == (tensor.shape, tensor.dtype)
        np.testing.assert_array_equal(result, np.full(tensor.shape, sum(r + place + 1 for r in range(size))))
    returned = hvd.grouped_allreduce_(tensors, op=hvd.Max)
    for place, (result, tensor) in enumerate(zip(returned, tensors, strict=True)):
        assert result is tensor
        np.testing.assert_array_equal(tensor, np.full(tensor.shape, size + place))
    assert hvd.grouped_allreduce([]) == []


def test_adasum_of_equal_and_of_orthogonal_gradients(hvd):
    gradient = np.arange(1.0, 8.0)
    np.testing.assert_allclose(hvd.allreduce(gradient, op=hvd.Adasum), gradient, rtol=1e-12)
    own = np.zeros(hvd.size())
    own[hvd.rank()] = hvd.rank() + 1
    np.testing.assert_allclose(hvd.allreduce(own, op=hvd.Adasum), np.arange(1.0, hvd.size() + 1), rtol=1e-12)


@pytest.mark.ranks(2)
def test_adasum_by_its_formula(hvd):
    a, b = np.array([1.0, 2.0, 0.5]), np.array([0.5, -1.0, 4.0])
    got = hvd.allreduce(a if hvd.rank() == 0 else b, op=hvd.Adasum)
    by_hand = (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b
    np.testing.assert_allclose(got, by_hand, rtol=1e-12)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", ["float32", "float64", "float16", "int32"])
@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_casts_give_every_reduction(hvd, compression, name):
    size = hvd.size()
    own = np.array([2.0**hvd.rank(), 3.0], name)
    expected = {
        "Sum": [2**size - 1, 3 * size], "Min": [1, 3], "Max": [2 ** (size - 1), 3],
        "Product": [2 ** (size * (size - 1) // 2), 3**size],
    }
    cast = {"compression": getattr(Compression, compression)}
    for op, value in expected.items():
        got, other = hvd.grouped_allreduce([own, own[::-1]], op=getattr(hvd, op), **cast)
        assert got.dtype == own.dtype and got.tolist() == value == other.tolist()[::-1]
    assert hvd.allreduce(own, op=hvd.Sum, postscale_factor=2.0, **cast).tolist() == [2 * v for v in expected["Sum"]]
    if name != "int32":
        np.testing.assert_allclose(hvd.allreduce(np.array([3.0, 4.0], name), op=hvd.Adasum, **cast), [3, 4], rtol=1e-2)
    if name in ("float32", "float64"):
        beyond = np.array([49152.0], name)
        assert hvd.allreduce(beyond, op=hvd.Sum, **cast) == 49152 * size


@pytest.mark.ranks(3)
class Plain:
    """A compressor of a user's own: compared by address, with an address in its description."""

    def reduce(self, gradients, states, group):
        means = []
        for gradient in gradients:
            means.append((yield SumRequest(gradient, 1 / group.size)))
        return Reduced(means, gradients)


class Bound(Plain):
    def bind(self, parameters):
        return Bound()


@dataclasses.dataclass
class Listed(Plain):
    """Has no hash, and can't be compared."""

    sizes: np.ndarray


class Halves:
    """In Horovod's manner."""

    __hash__ = None

    def compress(self, tensor):
        return tensor / 2, None

    def decompress(self, tensor, _):
        return tensor * 2


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("make", [Plain, Bound, lambda: Listed(np.arange(3)), Halves])
def test_whatever_a_compressor_is_ranks_agree_on_it(hvd, make, wrapped):
    own = Compression.min_size(make(), 2) if wrapped else make()
    for _ in range(3):
        x = np.full(4, hvd.rank() + 1.0)
        handle = hvd.allreduce_async(np.ones(2), name="plain", op=hvd.Sum)
        assert hvd.allreduce(x, name="own", compression=own).tolist() == [(hvd.size() + 1) / 2] * 4
        assert hvd.synchronize(handle).tolist() == [hvd.size()] * 2
    buckets = GradientBuckets([("w", (4,), "float32")], compression=own)
    buckets.views[0][:] = hvd.rank() + 1
    buckets.ready(0)
    assert buckets.finish() == [True]
    assert buckets.views[0].tolist() == [(hvd.size() + 1) / 2] * 4


@pytest.mark.parametrize("compression", ["int8", "topk", "powersgd", "sign"])
def test_what_gives_a_mean_gives_no_other_reduction(hvd, compression):
    compression = getattr(Compression, compression)
    for op in ("Min", "Max", "Product", "Adasum"):
        with pytest.raises(ValueError, match=rf"{op} through"):
            hvd.allreduce(np.ones(3), op=getattr(hvd, op), compression=compression, name="w")
    counted = hvd.allreduce(np.array([1, 2]), op=hvd.Sum, compression=compression, name="v", postscale_factor=2.0)
    assert counted.tolist() == [2 * hvd.size(), 4 * hvd.size()]


@pytest.mark.ranks(3)
def test_nan_and_infinity_travel(hvd):
    own = np.array([math.nan if hvd.rank() == 1 else 1.0, math.inf if hvd.rank() == 2 else 0.0, 1.0])
    for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max):
        got = hvd.allreduce(own, op=op)
        assert math.isnan(got[0])
        assert got[2] == (3.0 if op == hvd.Sum else 1.0)
    assert hvd.allreduce(own, op=hvd.Max)[1] == math.inf


@pytest.mark.parametrize("algorithm_elements", [1, 100, 10_000, 300_000])
def test_all_sizes_that_a_selection_might_tell_apart(hvd, algorithm_elements):
    for dtype in (np.float32, np.float16, np.int32):
        own = np.arange(algorithm_elements, dtype=np.int64) % 7 + hvd.rank()
        got = hvd.allreduce(own.astype(dtype), op=hvd.Sum)
        total = (np.arange(algorithm_elements) % 7) * hvd.size() + sum(range(hvd.size()))
        np.testing.assert_array_equal(got, total.astype(dtype))


def test_calls_that_repeat_with_other_lengths_in_between(hvd):
    """What one call leaves in shared memory lies elsewhere than what the next one, of another length, puts there."""
    order = random.Random(3)
    total = hvd.size() * (hvd.size() + 1) / 2
    for step in range(1, 81):
        elements = order.choice((1, 900, 9_000, 70_000, 250_000))
        array = np.full(elements, (hvd.rank() + 1.0) * step, np.float32)
        assert (hvd.allreduce_(array, op=hvd.Sum, name=f"of {elements}") == total * step).all()
