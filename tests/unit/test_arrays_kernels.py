"""Reductions give hand-computed values for every type, and agree with exact arithmetic on any input."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horo_lite.arrays import check_supported, kernel, numpy_dtype
from horo_lite.arrays.kernels import BLOCK_ELEMENTS
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
LOWEST, HIGHEST = -(2**63), 2**63 - 1
NAN, INF = math.nan, math.inf


def array(name, values):
    return np.array(values, dtype=numpy_dtype(name))


def reduce(name, reduction, rows, prescale=1.0, postscale=1.0):
    """What all ranks would hold, rows[r] being rank r's array."""
    arithmetic = kernel(name, reduction, len(rows), prescale, postscale)
    inputs = [array(name, row) for row in rows]
    for each in inputs:
        arithmetic.prescale(each)
    out = arithmetic.empty(len(inputs[0]))
    arithmetic.combine(out, inputs, last=True)
    assert out.dtype == numpy_dtype(name)
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
        ("float16", PRODUCT, [[300], [300], [0.001]], [float(np.float16(90000 * float(np.float16(0.001))))]),
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
        ("int64", AVERAGE, [[HIGHEST, LOWEST], [HIGHEST, LOWEST], [HIGHEST - 1, LOWEST]], [HIGHEST - 1, LOWEST]),
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
def test_values_by_hand(name, reduction, rows, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reduce(name, reduction, rows) == pytest.approx(expected, nan_ok=True, rel=0)


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
def test_scale_factors_by_hand(name, reduction, rows, prescale, postscale, expected):
    assert reduce(name, reduction, rows, prescale, postscale) == expected


@pytest.mark.parametrize("name", sorted(FLOATS))
@pytest.mark.parametrize("reduction", [MIN, MAX])
def test_nan_wins_minimum_and_maximum(name, reduction):
    result = reduce(name, reduction, [[NAN, 1, 2], [1, NAN, 3], [5, 5, 4]])
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
        ("uint64", SUM, ["uint64", "float32"]),
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
def test_out_may_be_any_input(name, elements):
    reduction = SUM if name == "bool" else AVERAGE
    random = np.random.default_rng(elements)
    inputs = [random.integers(0, 100, elements).astype(numpy_dtype(name)) for _ in range(4)]
    arithmetic = kernel(name, reduction, 4)
    expected = np.empty(elements, numpy_dtype(name))
    arithmetic.combine(expected, inputs, last=True)
    for place in range(4):
        copies = [each.copy() for each in inputs]
        arithmetic.combine(copies[place], copies, last=True)
        assert copies[place].tobytes() == expected.tobytes()
        assert all(np.array_equal(copies[k], inputs[k]) for k in range(4) if k != place)


def test_inputs_are_added_in_the_given_order_wherever_out_is():
    rows = [array("float32", [value]) for value in (1e8, -1e8, 1.0, 1e-8)]
    for place in range(4):
        copies = [each.copy() for each in rows]
        kernel("float32", SUM, 4).combine(copies[place], copies)
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
    assert reduce(name, AVERAGE, rows) == expected


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_integer_sum_and_product_wrap_as_the_type_does(data):
    name = data.draw(st.sampled_from(sorted(INTEGERS)))
    limits = np.iinfo(name)
    rows = data.draw(st.lists(st.integers(limits.min, limits.max), min_size=1, max_size=6))
    span = limits.max - limits.min + 1
    for reduction, exact in ((SUM, sum(rows)), (PRODUCT, math.prod(rows))):
        assert reduce(name, reduction, [[row] for row in rows]) == [
            (exact - limits.min) % span + limits.min
        ]


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
    assert (
        reduce(name, SUM, [[v] for v in row]) == total.astype(numpy_dtype(name)).reshape(1).tolist()
    )


@pytest.mark.parametrize("size", [1, 2, 3, 7, 49, 1000])
def test_average_of_equal_values_is_that_value(size):
    values = np.linspace(-3, 3, 1001).astype(np.float16).astype(np.float32)
    assert np.array_equal(np.float32(reduce("float32", AVERAGE, [values] * size)), values)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("float16", 1e-3), ("bfloat16", 1e-2), ("float32", 1e-6), ("float64", 0)],
)
def test_inner_and_blend(name, tolerance):
    elements = 2 * BLOCK_ELEMENTS + 3
    a = np.resize(array(name, [1, 2, -1]), elements)
    b = np.resize(array(name, [0.5, 1, 4]), elements)
    arithmetic = kernel(name, ADASUM, 2)
    assert arithmetic.inner(a, b) == pytest.approx(
        float(np.dot(a.astype(np.float64), b.astype(np.float64))), rel=1e-12
    )
    for out in (np.empty_like(a), a.copy(), b.copy()):
        left = out if np.array_equal(out, a) else a
        right = out if np.array_equal(out, b) else b
        arithmetic.blend(out, left, 0.25, right, 0.75)
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
