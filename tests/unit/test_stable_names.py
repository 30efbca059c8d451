"""Names of Keras variables by which ranks match them: independent of what else a process has built."""

from __future__ import annotations

from horo_lite.exchange_options import stable_names


def test_names_of_parameters_do_not_depend_on_what_was_built_before():
    first = ["model/dense/kernel", "model/dense/bias", "model/dense_1/kernel"]
    later = ["dense_7/kernel", "dense_7/bias", "dense_9/kernel"]
    assert stable_names(first) == stable_names(later) == ["dense/kernel", "dense/bias", "dense_1/kernel"]
    assert stable_names(["w", "w", "v:0"]) == ["w", "w#2", "v"]


def test_names_of_parameters_in_another_order_differ():
    for paths in (["dense/kernel", "dense_1/kernel"], ["dense_7/kernel", "dense_9/kernel"], ["left/w", "right/w"]):
        assert stable_names(paths) != stable_names(paths[::-1])
    assert stable_names(["dense_9/kernel", "dense_10/kernel"]) == ["dense/kernel", "dense_1/kernel"]
