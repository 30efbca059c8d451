"""Calls that cannot work: every rank hears of it, by an error that says what differs, and can go on."""

from __future__ import annotations

import json
import os
import threading
import warnings

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def still_usable(hvd):
    """Whatever went wrong in a test, the next collectives are right."""
    yield
    size = hvd.size()
    assert hvd.allreduce(np.ones(3), op=hvd.Sum).tolist() == [size] * 3
    assert hvd.allgather(np.array([hvd.rank()]), name="after").tolist() == list(range(size))


def raises_everywhere(hvd, call, *texts):
    with pytest.raises(hvd.DisagreementError) as caught:
        call()
    for text in texts:
        assert text in str(caught.value)
    assert isinstance(caught.value, hvd.HorovodInternalError)
    assert isinstance(caught.value, RuntimeError)


def on_last(hvd, last, others):
    """One value on the last rank, another on the others."""
    return last if hvd.rank() == hvd.size() - 1 else others


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("last", "others"), [((8,), (4,)), ((3, 2), (2, 3)), ((), (1,)), ((1, 4), (4,))])
def test_shapes(hvd, last, others):
    tensor = np.ones(on_last(hvd, last, others))
    for call in (hvd.allreduce, hvd.reducescatter, hvd.allreduce_, lambda t: hvd.broadcast(t, 0)):
        if call == hvd.reducescatter and () in (last, others):
            continue
        raises_everywhere(hvd, lambda call=call: call(tensor), "shapes", str(last), str(others))


@pytest.mark.ranks(3)
def test_trailing_dimensions_of_gathered_tensors(hvd):
    tensor = np.ones((hvd.rank() + 1, on_last(hvd, 4, 3)))
    raises_everywhere(hvd, lambda: hvd.allgather(tensor), "rank 1: (2, 3)", "rank 2: (3, 4)")
    raises_everywhere(hvd, lambda: hvd.alltoall(tensor, splits=[0, 0, 0]), "(3, 4)")
    flat = np.ones(on_last(hvd, (2, 2), (4,)))
    raises_everywhere(hvd, lambda: hvd.allgather(flat), "shapes")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("last", "others"), [("int32", "float32"), ("float64", "float32"), ("uint8", "int8")])
def test_types(hvd, last, others):
    tensor = np.ones(4, on_last(hvd, last, others))
    calls = [hvd.allreduce, hvd.allgather, hvd.reducescatter, hvd.alltoall]
    for call in calls if hvd.size() == 2 else calls[:3]:
        raises_everywhere(hvd, lambda call=call: call(tensor, name="types"), "data types", last, others, "'types'")
    raises_everywhere(hvd, lambda: hvd.broadcast(tensor, 0), "data types", last, others)


@pytest.mark.ranks(2, 3)
def test_operations_roots_factors_and_numbers(hvd):
    ones = np.ones(3)
    raises_everywhere(hvd, lambda: hvd.allreduce(ones, op=on_last(hvd, hvd.Max, hvd.Sum)), "Max", "Sum")
    raises_everywhere(hvd, lambda: hvd.broadcast(ones, on_last(hvd, 1, 0)), "root ranks")
    raises_everywhere(hvd, lambda: hvd.broadcast_object(7, on_last(hvd, 1, 0)), "root ranks")
    raises_everywhere(hvd, lambda: hvd.allreduce(ones, prescale_factor=on_last(hvd, 2, 1)), "prescale", "2.0", "1.0")
    raises_everywhere(hvd, lambda: hvd.allreduce(ones, postscale_factor=on_last(hvd, 0.5, 1)), "postscale", "0.5")
    raises_everywhere(hvd, lambda: hvd.grouped_allreduce([ones] * on_last(hvd, 2, 3), name="g"), "numbers", "2", "3")
    raises_everywhere(
        hvd, lambda: on_last(hvd, hvd.allgather, hvd.allreduce)(ones, name="k"), "operations", "allgather", "allreduce"
    )
    raises_everywhere(
        hvd,
        lambda: hvd.grouped_allreduce([ones, np.ones(on_last(hvd, 5, 4))], name="second"),
        "shapes", "(5,)", "(4,)",
    )  # fmt: skip


@pytest.mark.ranks(2, 3)
def test_a_disagreement_after_agreements_under_the_same_name(hvd):
    """The names are known to agree, so that requests go by their numbers; then one rank changes its mind."""
    for _ in range(3):
        hvd.allreduce(np.ones(4), name="loss")
    raises_everywhere(hvd, lambda: hvd.allreduce(np.ones(on_last(hvd, 8, 4)), name="loss"), "shapes", "'loss'")
    raises_everywhere(hvd, lambda: hvd.allreduce(np.ones(on_last(hvd, 4, 8)), name="loss"), "shapes", "'loss'")
    assert hvd.allreduce(np.full(4, 2.0), name="loss").tolist() == [2.0] * 4
    assert hvd.allreduce(np.full(8, 2.0), name="loss").tolist() == [2.0] * 8


@pytest.mark.ranks(2, 3)
def test_asynchronous_disagreement_beside_operations_that_agree(hvd):
    good = [hvd.allreduce_async(np.full(5, float(k)), name=f"good.{k}") for k in range(5)]
    bad = hvd.allreduce_async(np.ones(on_last(hvd, 3, 2)), name="bad")
    more = [hvd.allreduce_async(np.full(5, float(k)), name=f"more.{k}") for k in range(5)]
    raises_everywhere(hvd, lambda: hvd.synchronize(bad), "'bad'")
    for handles in (good, more):
        assert [hvd.synchronize(handle)[0] for handle in handles] == [0.0, 1.0, 2.0, 3.0, 4.0]


def read_only():
    array = np.ones(4)
    array.flags.writeable = False
    return array


WRONG = {
    "read-only in place": lambda hvd: hvd.allreduce_(read_only(), name="w"),
    "list in place": lambda hvd: hvd.allreduce_([1.0], name="w"),
    "read-only broadcast in place": lambda hvd: hvd.broadcast_(read_only(), 0, name="w"),
    "unsupported type": lambda hvd: hvd.allreduce(np.array(["text"]), name="w"),
    "an object": lambda hvd: hvd.allreduce(object(), name="w"),
    "a ragged list": lambda hvd: hvd.allreduce([[1.0], [1.0, 2.0]], name="w"),
    "bool average": lambda hvd: hvd.allreduce(np.array([True]), name="w"),
    "unknown op": lambda hvd: hvd.allreduce(np.ones(4), op=17, name="w"),
    "factor that is no number": lambda hvd: hvd.allreduce(np.ones(4), prescale_factor="much", name="w"),
    "no tensors at all": lambda hvd: hvd.grouped_allreduce(None, name="w"),
    "root that is no rank": lambda hvd: hvd.broadcast(np.ones(4), 5, name="w"),
    "root None": lambda hvd: hvd.broadcast(np.ones(4), None, name="w"),
    "root of an object": lambda hvd: hvd.broadcast_object(3, 5, name="w"),
    "an object that can't be pickled": lambda hvd: hvd.allgather_object(threading.Lock(), name="w"),
    "splits that do not fit": lambda hvd: hvd.alltoall(np.ones(4), [9] * hvd.size(), name="w"),
    "splits that are no integers": lambda hvd: hvd.alltoall(np.ones(4), [0.5] * hvd.size(), name="w"),
    "too many splits": lambda hvd: hvd.alltoall(np.ones(9), [0] * (hvd.size() + 1), name="w"),
    "negative splits": lambda hvd: hvd.alltoall(np.ones(9), [-1] * hvd.size(), name="w"),
    "ragged splits": lambda hvd: hvd.alltoall(np.ones(9), [[1], [1, 2]], name="w"),
    "scatter of a scalar": lambda hvd: hvd.reducescatter(np.array(1.0), name="w"),
    "scatter with Max": lambda hvd: hvd.reducescatter(np.ones(4), op=hvd.Max, name="w"),
    "alltoall of a scalar": lambda hvd: hvd.alltoall(np.array(1.0), name="w"),
}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", WRONG)
def test_wrong_arguments_on_all_ranks(hvd, kind):
    for _ in range(2):
        with pytest.raises((ValueError, TypeError)):
            WRONG[kind](hvd)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", WRONG)
def test_wrong_arguments_on_one_rank_only(hvd, kind):
    """The rank that made the mistake gets ValueError or TypeError; the others are told instead of waiting."""
    for culprit in (0, hvd.size() - 1):
        if hvd.rank() == culprit:
            with pytest.raises((ValueError, TypeError)):
                WRONG[kind](hvd)
        else:
            raises_everywhere(hvd, lambda: hvd.allreduce(np.ones(4), name="w"), f"rank {culprit} could not take part")


@pytest.mark.ranks(3)
def test_an_unnamed_mistake_on_one_rank_keeps_the_numbering(hvd):
    if hvd.rank() == 1:
        with pytest.raises(ValueError, match="op"):
            hvd.allreduce(np.ones(2), op=99)
    else:
        raises_everywhere(hvd, lambda: hvd.allreduce(np.ones(2)), "rank 1 could not take part")
    assert hvd.allreduce(np.array([hvd.rank()])).tolist() == [1]
    if hvd.rank() == 2:
        with pytest.raises(TypeError, match="type lock"):
            hvd.broadcast_object(threading.Lock(), root_rank=2)
    else:
        raises_everywhere(hvd, lambda: hvd.broadcast_object(None, root_rank=2), "rank 2 could not take part")
    assert hvd.broadcast_object(hvd.rank(), root_rank=2) == 2


@pytest.mark.ranks(2)
def test_errors_name_what_was_given_and_expected(hvd):
    with pytest.raises(ValueError, match=r"root_rank=5.*\[0, 1\]"):
        hvd.broadcast(np.ones(1), 5)
    with pytest.raises(TypeError, match="Average of bool"):
        hvd.allreduce(np.array([True]))
    with pytest.raises(TypeError, match="object"):
        hvd.allreduce(object())
    with pytest.raises(ValueError, match="divisible"):
        hvd.alltoall(np.ones(3))


def test_a_forked_child_is_told_that_it_is_no_rank(hvd):
    """Every way to begin something raises at once; ranks and sizes can be asked, and ``shutdown`` ends nothing."""
    values = np.ones(3)
    handle = hvd.allreduce_async(values, name="of the parent")
    calls = {
        "allreduce": lambda: hvd.allreduce(values, name="forked"),
        "repeated": lambda: hvd.allreduce(values, name="repeated"),
        "async": lambda: hvd.allreduce_async(values, name="forked later"),
        "synchronize": lambda: hvd.synchronize(handle),
        "barrier": hvd.barrier,
    }
    for _ in range(3):
        hvd.allreduce(values, name="repeated")
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if child == 0:
        told = {"ranks": f"{hvd.rank()} of {hvd.size()}"}
        for what, call in calls.items():
            try:
                call()
            except BaseException as error:
                told[what] = f"{type(error).__name__}: {error}"
        hvd.shutdown()
        os.write(writing, json.dumps(told).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        told = json.loads(answers.read())
    assert os.waitpid(child, 0)[1] == 0
    assert told.pop("ranks") == f"{hvd.rank()} of {hvd.size()}"
    assert told.keys() == calls.keys()
    for answer in told.values():
        assert answer.startswith("HorovodInternalError")
        assert f"was forked from rank {hvd.rank()}" in answer
    assert hvd.synchronize(handle).tolist() == [1.0] * 3


@pytest.mark.ranks(1, 2)
def test_a_name_that_is_no_string_is_refused_before_anything_is_asked_for(hvd):
    ones = np.ones(2)
    for name in (3, b"bytes", ("a", 1)):
        for ask in (
            lambda name: hvd.allreduce(ones, name=name),
            lambda name: hvd.allreduce_async(ones, name=name),
            lambda name: hvd.allgather(ones, name),
            lambda name: hvd.broadcast(ones, 0, name),
            lambda name: hvd.broadcast_object(1, 0, name),
        ):
            with pytest.raises(TypeError, match="name"):
                ask(name)
    assert hvd.allreduce(ones, op=hvd.Sum).tolist() == [hvd.size()] * 2


@pytest.mark.ranks(1, 2)
def test_a_process_set_that_is_none_is_refused_before_anything_is_asked_for(hvd):
    ones = np.ones(2)
    for wrong in (3, [0], "global"):
        for ask in (
            lambda wrong: hvd.allreduce(ones, process_set=wrong),
            lambda wrong: hvd.allreduce(np.ones(2, object), process_set=wrong),
            lambda wrong: hvd.grouped_allreduce_async([ones], process_set=wrong),
            lambda wrong: hvd.allgather(ones, process_set=wrong),
            lambda wrong: hvd.broadcast_object(1, 0, process_set=wrong),
            lambda wrong: hvd.barrier(process_set=wrong),
        ):
            with pytest.raises(TypeError, match="expected a ProcessSet"):
                ask(wrong)
    assert hvd.allreduce(ones, op=hvd.Sum).tolist() == [hvd.size()] * 2
