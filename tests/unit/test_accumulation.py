"""Sums of gradients over the passes of a window, with values by hand."""

from __future__ import annotations

import numpy as np
import pytest

from horo_lite.accumulation import Window


def array(*values):
    return np.array(values, "float32")


@pytest.mark.parametrize("average, expected", [(False, [8.0, 10.0]), (True, [4.0, 5.0])])
def test_an_update_is_due_after_the_last_pass(average, expected):
    window = Window(2, average)
    for _ in range(2):
        first = array(3.0, 4.0)
        assert not window.add({"w": first})
        first[:] = 99.0  # the caller's memory is its own
        assert window.add({"w": array(5.0, 6.0)})
        sums = window.take()
        assert sums["w"].tolist() == expected and sums["w"].dtype == np.float32


def test_what_some_pass_had_counts_and_what_none_had_is_left_out():
    window = Window(3, average=True)
    for given in ({"a": array(3.0)}, {"b": np.float32(6.0)}, {}):
        due = window.add(given)
    assert due
    sums = window.take()
    assert sorted(sums) == ["a", "b"] and float(sums["a"][0]) == 1.0 and float(sums["b"]) == 2.0


def test_a_window_with_nan_ends_with_it():
    window = Window(1, average=False)
    window.add({"w": array(np.nan)})
    assert np.isnan(window.take()["w"]).all()
    window.add({"w": array(1.0)})
    assert window.take()["w"].tolist() == [1.0]


@pytest.mark.parametrize("type_name", ["float16", "bfloat16"])
def test_the_type_stays(type_name):
    from horo_lite.arrays import numpy_dtype

    window = Window(2, average=True)
    for _ in range(2):
        window.add({"w": np.ones(3, numpy_dtype(type_name))})
    sums = window.take()["w"]
    assert sums.dtype == numpy_dtype(type_name) and sums.astype("float32").tolist() == [1.0] * 3
