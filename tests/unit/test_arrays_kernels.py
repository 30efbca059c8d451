"""Reductions give hand-computed values for every type and agree with exact arithmetic."""

from __future__ import annotations

import importlib
import importlib.util
import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horo_lite.arrays import Flat, check_supported, kernel, numpy_dtype, to_torch, type_name
from horo_lite.arrays.numpy_backend import NumpyBackend
from horo_lite.arrays.types import COMPLEX, FLOATS, HALVES, INTEGERS, ITEM_BYTES
from horo_lite.errors import ArgumentError, ArgumentTypeError
from horo_lite.interfaces import Reduction

SUM, AVERAGE, MIN, MAX, PRODUCT, ADASUM = (
    Reduction.SUM,
    Reduction.AVERAGE,
    Reduction.MIN,
    Reduction.MAX,
    Reduction.PRODUCT,
    Reduction.ADASUM,
)
BLOCK_ELEMENTS = NumpyBackend.block_elements
LOWEST, HIGHEST = -(2**63), 2**63 - 1
NAN, INF = math.nan, math.inf
DEVICES = ["cpu"] + ["torch-cpu"] * (importlib.util.find_spec("torch") is not None)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True, scope="module")
def _torch_is_loaded_where_it_is_installed():
    if len(DEVICES) > 1:
        importlib.import_module("torch")


def array(name, values):
    return np.array(values, dtype=numpy_dtype(name))


def put(values, device):
    """A numpy array, or a torch tensor on its memory, so that what happens to it is seen here."""
    return values if device == "cpu" else to_torch(values)


def reduce(name, reduction, rows, prescale=1.0, postscale=1.0, device="cpu"):
    """What all ranks would hold, rows[r] being rank r's array."""
    arithmetic = kernel(name, reduction, len(rows), prescale, postscale, device)
    inputs = [put(array(name, row), device) for row in rows]
    for each in inputs:
        arithmetic.prescale(each)
    out = arithmetic.empty(len(inputs[0]))
    arithmetic.combine(out, inputs, last=True)
    assert type_name(out) == name
    return out.tolist()


@pytest.mark.parametrize(
    ("name", "reduction", "rows", "expected"),
    [
        ("bfloat16", SUM, [[256], [1], [1]], [258]),
        ("bfloat16", SUM, [[1, 0, 2], [1, 0, 2]], [2, 0, 4]),
        ("bfloat16", AVERAGE, [[256], [1], [1]], [86]),
        ("bfloat16", PRODUCT, [[3], [5], [0.5]], [7.5]),
        ("float16", SUM, [[2048], [1], [1]], [2050]),
        ("float16", AVERAGE, [[1], [2]], [1.5]),
        ("float16", AVERAGE, [[65504], [65504]], [65504]),
        ("float16", SUM, [[65504], [65504]], [INF]),
        ("float16", PRODUCT, [[512], [512], [0.125]], [32768]),
        ("float32", SUM, [[1, -1], [2, 5]], [3, 4]),
        ("float32", AVERAGE, [[7], [7], [7]], [7]),
        ("float64", PRODUCT, [[1.5], [2], [4]], [12]),
        ("uint8", AVERAGE, [[200], [200]], [200]),
        ("uint8", SUM, [[200], [100]], [44]),
        ("uint8", PRODUCT, [[16], [17]], [16]),
        ("int8", AVERAGE, [[120], [100]], [110]),
        ("int8", AVERAGE, [[-128], [-128], [-127]], [-127]),
        ("uint16", AVERAGE, [[65535], [65534]], [65534]),
        ("int16", AVERAGE, [[-1, 1], [-2, 2]], [-1, 1]),
        ("int32", AVERAGE, [[2**31 - 1], [2**31 - 1]], [2**31 - 1]),
        ("int32", SUM, [[2**31 - 1], [1]], [-(2**31)]),
        ("int64", AVERAGE, [[-1, 1], [-2, 2]], [-1, 1]),
        ("int64", AVERAGE, [[HIGHEST], [HIGHEST], [HIGHEST - 1]], [HIGHEST - 1]),
        ("int64", AVERAGE, [[LOWEST], [LOWEST], [LOWEST]], [LOWEST]),
        ("int64", AVERAGE, [[HIGHEST], [LOWEST]], [0]),
        ("int64", SUM, [[HIGHEST], [1]], [LOWEST]),
        ("int64", MIN, [[3, LOWEST], [4, 0]], [3, LOWEST]),
        ("bool", SUM, [[0, 0, 1], [0, 1, 1]], [False, True, True]),
        ("bool", MAX, [[0, 0, 1], [0, 1, 1]], [False, True, True]),
        ("bool", MIN, [[0, 0, 1], [0, 1, 1]], [False, False, True]),
        ("bool", PRODUCT, [[0, 0, 1], [0, 1, 1]], [False, False, True]),
        ("complex64", SUM, [[1 + 2j], [3 - 1j]], [4 + 1j]),
        ("complex128", AVERAGE, [[1 + 2j], [3]], [2 + 1j]),
        ("float32", SUM, [[INF, INF], [1, -INF]], [INF, NAN]),
    ],
)  # fmt: skip
def test_values_by_hand(name, reduction, rows, expected, device):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = reduce(name, reduction, rows, device=device)
        assert result == pytest.approx(expected, nan_ok=True, rel=0)


@pytest.mark.parametrize(
    ("name", "reduction", "rows", "prescale", "postscale", "expected"),
    [
        ("float32", SUM, [[3], [5]], 0.5, 1.0, [4]),
        ("float32", SUM, [[3], [5]], 1.0, 0.25, [2]),
        ("float32", AVERAGE, [[3], [5]], 2.0, 0.5, [4]),
        ("float32", MAX, [[3], [5]], 2.0, 0.5, [5]),
        ("float16", SUM, [[40000], [40000]], 0.5, 1.0, [40000]),
        ("bfloat16", AVERAGE, [[256], [0]], 2.0, 3.0, [768]),
        ("bfloat16", MIN, [[3], [5]], -2.0, 1.0, [-10]),
        ("int32", SUM, [[3, -3], [4, -4]], 0.5, 1.0, [3, -3]),
        ("int32", SUM, [[3, -3], [4, -4]], 1.0, 0.5, [3, -3]),
        ("int32", AVERAGE, [[10], [10], [10]], 1.0, 0.5, [5]),
        ("int64", AVERAGE, [[10], [10], [10]], 1.0, 0.5, [5]),
        ("int64", AVERAGE, [[10, -7], [11, -8]], 0.5, 2.0, [10, -7]),
        ("uint8", SUM, [[100], [100]], 1.0, 2.0, [255]),
        ("int8", SUM, [[-100], [0]], 1.0, 2.0, [-128]),
        ("int64", SUM, [[2**62], [0]], 1.0, 4.0, [2**63 - 1024]),
        ("complex64", SUM, [[1 + 2j], [1]], 0.5, 3.0, [3 + 3j]),
    ],
)  # fmt: skip
def test_scale_factors_by_hand(name, reduction, rows, prescale, postscale, expected, device):
    assert reduce(name, reduction, rows, prescale, postscale, device) == expected


@pytest.mark.parametrize("name", sorted(FLOATS))
@pytest.mark.parametrize("reduction", [MIN, MAX])
def test_nan_wins_minimum_and_maximum(name, reduction, device):
    rows = [[NAN, 1, 2], [1, NAN, 3], [5, 5, 4]]
    result = reduce(name, reduction, rows, device=device)
    assert [math.isnan(value) for value in result] == [True, True, False]


@pytest.mark.parametrize("name", sorted(ITEM_BYTES))
def test_wide_where_partial_results_must_not_travel(name):
    for reduction in Reduction:
        try:
            check_supported(name, reduction, 1.0, 1.0)
        except ArgumentTypeError:
            continue
        expected = (name in HALVES and reduction in (SUM, AVERAGE, PRODUCT)) or (
            name in INTEGERS and reduction is AVERAGE
        )
        assert kernel(name, reduction, 3).wide is expected


@pytest.mark.parametrize(
    ("name", "reduction", "words"),
    [
        ("bool", AVERAGE, ["bool", "Average"]),
        ("bool", ADASUM, ["bool", "Adasum"]),
        ("int32", ADASUM, ["int32", "Adasum"]),
        ("complex64", MIN, ["complex64", "Min"]),
        ("complex128", PRODUCT, ["complex128", "Product"]),
        ("uint64", SUM, ["uint64", "Sum"]),
        ("float8_e5m2", MAX, ["float8_e5m2", "Max"]),
    ],
)
def test_impossible_reductions_name_type_and_operation(name, reduction, words):
    with pytest.raises(ArgumentTypeError) as caught:
        kernel(name, reduction, 2)
    assert all(word in str(caught.value) for word in words)


def test_bool_takes_no_scale_factor():
    with pytest.raises(ArgumentTypeError, match="scale"):
        kernel("bool", SUM, 2, postscale=0.5)


@pytest.mark.parametrize("name", ["float32", "float16", "int16", "int64", "bool", "complex64"])
@pytest.mark.parametrize(
    "elements", [0, 1, 7, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1, 3 * BLOCK_ELEMENTS - 5]
)
def test_out_may_be_any_input(name, elements, device):
    reduction = SUM if name == "bool" else AVERAGE
    random = np.random.default_rng(elements)
    inputs = [random.integers(0, 100, elements).astype(numpy_dtype(name)) for _ in range(4)]
    arithmetic = kernel(name, reduction, 4, device=device)
    expected = np.empty(elements, numpy_dtype(name))
    arithmetic.combine(put(expected, device), [put(each, device) for each in inputs], last=True)
    for place in range(4):
        copies = [each.copy() for each in inputs]
        tensors = [put(each, device) for each in copies]
        arithmetic.combine(tensors[place], tensors, last=True)
        assert copies[place].tobytes() == expected.tobytes()
        assert all(np.array_equal(copies[k], inputs[k]) for k in range(4) if k != place)


def test_inputs_are_added_in_the_given_order_wherever_out_is(device):
    rows = [array("float32", [value]) for value in (1e8, -1e8, 1.0, 1e-8)]
    for place in range(4):
        copies = [each.copy() for each in rows]
        tensors = [put(each, device) for each in copies]
        kernel("float32", SUM, 4, device=device).combine(tensors[place], tensors)
        assert copies[place][0] == np.float32(1.0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_integer_average_is_exact_and_truncates(data):
    name = data.draw(st.sampled_from(sorted(INTEGERS)))
    limits = np.iinfo(name)
    size = data.draw(st.integers(1, 9))
    values = st.one_of(
        st.integers(limits.min, limits.max),
        st.sampled_from([limits.min, limits.max, limits.max - 1, 0, 1]),
    )
    rows = data.draw(
        st.lists(st.lists(values, min_size=3, max_size=3), min_size=size, max_size=size)
    )
    expected = [math.trunc(Fraction(sum(column), size)) for column in zip(*rows, strict=True)]
    for device in DEVICES:
        assert reduce(name, AVERAGE, rows, device=device) == expected


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_integer_sum_and_product_wrap_as_the_type_does(data):
    name = data.draw(st.sampled_from(sorted(INTEGERS)))
    limits = np.iinfo(name)
    rows = data.draw(st.lists(st.integers(limits.min, limits.max), min_size=1, max_size=6))
    span = limits.max - limits.min + 1
    for reduction, exact in ((SUM, sum(rows)), (PRODUCT, math.prod(rows))):
        expected = [(exact - limits.min) % span + limits.min]
        for device in DEVICES:
            assert reduce(name, reduction, [[row] for row in rows], device=device) == expected


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(HALVES)),
    st.lists(st.floats(-1000, 1000, width=16), min_size=1, max_size=8),
)
def test_half_sums_are_float32_sums_rounded_once(name, row):
    values = [array(name, [value]) for value in row]
    total = np.float32(0)
    for value in values:
        total += value.astype(np.float32)[0]
    expected = [total.astype(numpy_dtype(name)).item()]
    for device in DEVICES:
        assert reduce(name, SUM, [[value] for value in row], device=device) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 7, 49, 1000])
def test_average_of_equal_values_is_that_value(size, device):
    values = np.linspace(-3, 3, 1001).astype(np.float16).astype(np.float32)
    result = reduce("float32", AVERAGE, [values] * size, device=device)
    assert np.array_equal(np.float32(result), values)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("float16", 1e-3), ("bfloat16", 1e-2), ("float32", 1e-6), ("float64", 0)],
)
def test_inner_and_blend(name, tolerance, device):
    elements = 2 * BLOCK_ELEMENTS + 3
    triples, rest = divmod(elements, 3)
    a = np.resize(array(name, [1, 2, -1]), elements)
    b = np.resize(array(name, [0.5, 1, 4]), elements)
    arithmetic = kernel(name, ADASUM, 2, device=device)
    exact = triples * (0.5 + 2 - 4) + (0, 0.5, 2.5)[rest]
    assert arithmetic.inner(put(a, device), put(b, device)) == exact
    for place in range(3):  # out apart, out is a, out is b
        left, right = a.copy(), b.copy()
        out = (np.zeros_like(a), left, right)[place]
        arithmetic.blend(put(out, device), put(left, device), 0.25, put(right, device), 0.75)
        assert out[:3].astype(float) == pytest.approx([0.625, 1.25, 2.75], rel=tolerance)
        assert np.array_equal(out, np.resize(out[:3], elements))


def test_inner_of_long_float32_arrays_is_summed_in_float64():
    ones = np.full(1 << 18, 0.1, np.float32)
    assert kernel("float32", ADASUM, 2).inner(ones, ones) == pytest.approx(
        (1 << 18) * float(np.float32(0.1)) ** 2, rel=1e-12
    )


def test_adasum_is_not_combined():
    with pytest.raises(ArgumentError, match="inner"):
        kernel("float32", ADASUM, 2).combine(np.zeros(1), [np.zeros(1), np.zeros(1)])


@pytest.mark.parametrize("name", sorted(COMPLEX))
def test_complex_scaling_keeps_infinities(name):
    result = np.asarray(reduce(name, AVERAGE, [[complex(INF, 1)], [complex(1, 1)]]))
    assert (result.real[0], result.imag[0]) == (INF, 1)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    elements = 2**31 + 8
    a, b = np.ones(elements, np.int8), np.ones(elements, np.int8)
    a[-1], b[-1] = 3, 4
    kernel("int8", SUM, 2).combine(a, [a, b], last=True)
    assert (a[0], a[2**31 - 1], a[2**31], a[-1]) == (2, 2, 2, 7)
    flat = Flat(a.reshape(2, -1), writable=True)
    assert (flat.is_view, len(flat.buffer), flat.buffer[-1]) == (True, elements, 7)
