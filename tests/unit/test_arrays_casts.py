"""Casts round to nearest even, the same with and without torch."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from horo_lite.arrays import cast, numpy_dtype


@pytest.fixture(params=["numpy alone", "with torch"])
def loaded(request, monkeypatch):
    if request.param == "with torch":
        pytest.importorskip("torch")
    else:
        monkeypatch.delitem(sys.modules, "torch", raising=False)


def through(name, values, elements):
    """Values cast to a 16-bit float and back, as part of a long or a short array."""
    wide = np.resize(np.array(values, np.float32), elements)
    narrow = np.empty(elements, numpy_dtype(name))
    back = np.empty(elements, np.float32)
    with np.errstate(all="ignore"):
        cast(narrow, wide)
        cast(back, narrow)
    assert np.array_equal(back, np.resize(back[: len(values)], elements), equal_nan=True)
    return back[: len(values)].tolist()


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("elements", [8, 100_000])
@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("float16", [2049, 2051, 2050, -2049], [2048, 2052, 2050, -2048]),
        ("float16", [65519, 65520, 1e9, -1e9], [65504, math.inf, math.inf, -math.inf]),
        ("float16", [2**-24, 2**-25, 3 * 2**-26, -0.0], [2**-24, 0, 2**-24, -0.0]),
        ("bfloat16", [257, 259, 258, -257], [256, 260, 258, -256]),
        ("bfloat16", [3.4e38, -3.4e38, 1e-40, 0], [math.inf, -math.inf, 1e-40, 0]),
    ],
)
def test_values_by_hand(name, values, expected, elements):
    assert through(name, values, elements) == pytest.approx(
        expected, rel=0.01 if 1e-40 in values else 0
    )


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("elements", [8, 100_000])
def test_nan_stays_nan_and_infinities_stay(name, elements):
    tricky = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    result = through(name, [*tricky, math.inf, -math.inf], elements)
    assert [math.isnan(value) for value in result] == [True, True, True, False, False]
    assert result[3:] == [math.inf, -math.inf]


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_value_survives_the_way_up_and_down(name):
    every = np.arange(1 << 16).astype(np.uint16).view(numpy_dtype(name))
    wide = np.empty(1 << 16, np.float32)
    cast(wide, every)
    back = np.empty_like(every)
    with np.errstate(all="ignore"):
        cast(back, wide)
    numbers = ~np.isnan(wide)
    assert np.array_equal(back.view(np.uint16)[numbers], every.view(np.uint16)[numbers])
    assert np.isnan(back[~numbers].astype(np.float32)).all()


@pytest.mark.usefixtures("loaded")
def test_read_only_sources_are_cast_too():
    source = np.ones(5000, np.float32)
    source.flags.writeable = False
    out = np.empty(5000, np.float16)
    cast(out, source)
    assert (out == 1).all()
