"""Plans are the same pure function on every rank; layouts and differences by hand."""

from __future__ import annotations

import dataclasses
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horo_lite.arrays import item_bytes, kernel, numpy_dtype
from horo_lite.buckets import ALIGNMENT_BYTES, BucketProgress, GradientSpec, plan
from horo_lite.errors import ArgumentError, ArgumentTypeError
from horo_lite.interfaces import Reduction


def floats(**elements):
    return [GradientSpec(name, (count,), "float32") for name, count in elements.items()]


def names(made):
    return [[slot.spec.name for slot in bucket.slots] for bucket in made.buckets]


def test_layout_by_hand():
    specs = [
        GradientSpec("a", (2, 3), "float32"),
        GradientSpec("b", (17,), "float32"),
        GradientSpec("c", (), "float32"),
    ]
    (bucket,) = plan(specs, 1 << 20).buckets
    assert [(slot.spec.name, slot.index, slot.start, slot.stop) for slot in bucket.slots] == [
        ("c", 2, 0, 1),
        ("b", 1, 16, 33),  # 64 bytes are 16 floats
        ("a", 0, 48, 54),
    ]
    assert (bucket.used_start, bucket.elements, bucket.nbytes) == (64, 80, 320)


def test_buckets_fill_from_the_back_and_a_large_gradient_is_alone():
    specs = floats(a=16, b=16, c=100, d=16, e=16, f=16)
    made = plan(specs, 2 * 64)
    # c stands alone, and does not split the bucket that is being filled around it.
    assert names(made) == [["f", "e"], ["c"], ["d", "b"], ["a"]]


def test_a_bucket_has_one_type_and_types_fill_side_by_side():
    specs = [
        GradientSpec("a", (16,), "float32"),
        GradientSpec("b", (16,), "bfloat16"),
        GradientSpec("c", (16,), "float32"),
        GradientSpec("d", (16,), "bfloat16"),
    ]
    made = plan(specs, 1 << 20)
    assert names(made) == [["d", "b"], ["c", "a"]]
    assert [bucket.type_name for bucket in made.buckets] == ["bfloat16", "float32"]


def test_bucket_size_zero_gives_each_gradient_its_own():
    assert names(plan(floats(a=1, b=1, c=0), 0)) == [["c"], ["b"], ["a"]]


def test_groups_are_units_whatever_their_size():
    specs = floats(a=16, b=16, c=16, d=16, e=16)
    made = plan(specs, 64, groups=[["a", "c", "d"]])
    # The group is complete when a is ready, b and e are divided as usual.
    assert names(made) == [["e"], ["b"], ["d", "c", "a"]]
    assert made.groups == (("a", "c", "d"),)


def test_a_group_of_two_types_has_two_buckets():
    specs = [*floats(a=4, b=4), GradientSpec("h", (4,), "float16")]
    assert names(plan(specs, 1 << 20, groups=[["a", "h"]])) == [["h"], ["b"], ["a"]]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, [["e", "d", "c", "b", "a"]]),
        (1, [["e", "d", "c", "b", "a"]]),
        (2, [["e", "d"], ["c", "b", "a"]]),
        (3, [["e"], ["d", "c"], ["b", "a"]]),
        (9, [["e"], ["d"], ["c"], ["b"], ["a"]]),
    ],
)
def test_a_number_of_groups_splits_the_names_as_horovod_does(count, expected):
    assert names(plan(floats(a=1, b=1, c=1, d=1, e=1), 1 << 20, groups=count)) == expected


def test_offsets_in_one_block_do_not_share_a_page():
    made = plan(floats(a=2000, b=10, c=10), 1000)
    assert [bucket.offset_bytes for bucket in made.buckets] == [0, 4096]
    assert made.nbytes == 4096 + 8192  # 8,000 bytes and one used element
    assert plan([], 100).nbytes == 0


def test_no_gradients_no_buckets():
    assert plan([], 100).buckets == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"specs": floats(a=1) + floats(a=2)}, ["'a' twice", "(1,)", "(2,)"]),
        ({"bucket_bytes": -1}, ["-1"]),
        ({"groups": [["a"], ["b", "a"]]}, ["'a'", "0 and 1"]),
        ({"groups": [["z"]]}, ["'z'"]),
        ({"groups": -2}, ["-2"]),
    ],
)
def test_wrong_arguments_are_named(arguments, words):
    with pytest.raises(ArgumentError) as caught:
        plan(**{"specs": floats(a=1, b=1), "bucket_bytes": 64, **arguments})
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("name", ["int32", "bool", "uint8"])
def test_gradients_are_floats(name):
    with pytest.raises(ArgumentTypeError, match=f"{name} for 'steps'"):
        plan([GradientSpec("steps", (), name)], 64)


def test_differences_name_the_parameter_and_both_values():
    four = plan(floats(a=1, b=2, c=3, d=4), 64)
    six = plan(floats(a=1, b=2, x=1, c=3, d=4, y=1), 64)
    assert four.difference(four) is None
    assert four.difference(six) == ("x", "absent", "float32 (1,)")
    assert six.difference(four) == ("x", "float32 (1,)", "absent")
    shaped = plan(floats(a=1, b=5, c=3, d=4), 64)
    assert four.difference(shaped) == ("b", "float32 (2,)", "float32 (5,)")
    swapped = plan(floats(a=1, c=3, b=2, d=4), 64)
    assert four.difference(swapped) == (
        "b", "registered as number 1", "c registered as number 1",
    )  # fmt: skip
    assert four.difference(plan(four.specs, 128)) == ("bucket_bytes", "64", "128")
    assert four.difference(plan(four.specs, 64, groups=[["a"]])).what == "groups"
    typed = plan([dataclasses.replace(four.specs[0], type_name="float64"), *four.specs[1:]], 64)
    assert four.difference(typed) == ("a", "float32 (1,)", "float64 (1,)")


def test_equal_plans_have_equal_digests_also_after_a_journey():
    made = plan(floats(a=1, b=2), 64, groups=[["a"]])
    again = plan(iter(floats(a=1, b=2)), 64, groups=(("a",),))
    assert made == again
    assert made.digest == again.digest
    assert len(made.digest) == 16
    assert pickle.loads(pickle.dumps(made)) == made
    assert made.digest.hex() == "5725235075fd254d7117335dcdf92148"  # on any machine


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("reduction", [Reduction.SUM, Reduction.AVERAGE])
@pytest.mark.parametrize("scale", [(1.0, 1.0), (1e-30, 1e-30), (0.0, -1.0)])
def test_used_by_nobody_is_known_after_the_reduction(name, reduction, scale):
    specs = [GradientSpec(letter, (3,), name) for letter in "dcba"]  # ready in the order abcd
    (bucket,) = plan(specs, 1 << 20).buckets
    ranks = [[True, False, False, True], [True, True, False, False], [True, False, False, False]]
    arithmetic = kernel(name, reduction, len(ranks), *scale)
    buffers = [np.zeros(bucket.elements, numpy_dtype(name)) for _ in ranks]
    for buffer, used in zip(buffers, ranks, strict=True):
        bucket.write_used(buffer, used)
        arithmetic.prescale(buffer)
    arithmetic.combine(buffers[0], buffers, last=True)
    assert bucket.read_used(buffers[0]) == ([True, True, False, True], False)
    if scale[0]:
        assert all(not view.any() for view in bucket.views(buffers[0]))


def test_used_on_tensors_and_rewritten_every_step():
    torch = pytest.importorskip("torch")
    (bucket,) = plan(floats(a=3, b=4), 1 << 20).buckets
    buffer = torch.zeros(bucket.elements)
    for used in ([True, True], [False, True], [False, False], [True, False]):
        bucket.write_used(buffer, used)
        assert bucket.read_used(buffer) == (used, False)
    assert [len(view) for view in bucket.views(buffer)] == [4, 3]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_gradient_has_one_aligned_place(data):
    kinds = st.sampled_from(["float16", "float32", "float64", "complex128"])
    shapes = st.lists(st.integers(0, 40), max_size=2).map(tuple)
    drawn = data.draw(st.lists(st.tuples(shapes, kinds), max_size=30))
    specs = [GradientSpec(f"p{k}", shape, kind) for k, (shape, kind) in enumerate(drawn)]
    members = data.draw(st.sets(st.sampled_from([spec.name for spec in specs]), max_size=5)) if specs else set()
    bucket_bytes = data.draw(st.sampled_from([0, 64, 1000, 10_000]))
    made = plan(specs, bucket_bytes, [sorted(members)])
    seen = sorted(slot.index for bucket in made.buckets for slot in bucket.slots)
    assert seen == list(range(len(specs)))
    end_bytes = 0
    for index, bucket in enumerate(made.buckets):
        assert bucket.index == index
        assert bucket.offset_bytes >= end_bytes
        end_bytes = bucket.offset_bytes + bucket.nbytes
        position = 0
        for slot in bucket.slots:
            assert slot.spec == specs[slot.index]
            assert slot.spec.type_name == bucket.type_name
            assert slot.start >= position
            assert slot.start * item_bytes(bucket.type_name) % ALIGNMENT_BYTES == 0
            assert slot.stop - slot.start == math.prod(slot.spec.shape)
            position = slot.stop
        assert position <= bucket.used_start
        assert bucket.used_start + len(bucket.slots) <= bucket.elements
        apart = not members & {slot.spec.name for slot in bucket.slots}
        filled = bucket.used_start * item_bytes(bucket.type_name)
        assert not apart or len(bucket.slots) == 1 or filled <= bucket_bytes
    assert end_bytes <= made.nbytes


def test_buckets_go_in_one_order_whatever_is_complete_first():
    made = plan(floats(a=16, b=16, c=16, d=16), 128)
    assert names(made) == [["d", "c"], ["b", "a"]]
    progress = BucketProgress(made)
    assert [progress.put(index) for index in (0, 0, 1, 3)] == [False, False, True, False]  # a, a, b, d
    assert list(progress.due()) == []  # the second is complete, the first is not
    assert progress.as_completed() == [1, 0]
    assert progress.put(2)
    assert list(progress.due()) == [0, 1]
    assert list(progress.due()) == progress.rest() == []
    progress.order = progress.as_completed()
    progress.begin()
    assert progress.ready == [False] * 4
    assert [progress.put(index) for index in (3, 2)] == [False, True]
    assert list(progress.due()) == []  # now the second goes first
    assert progress.rest() == [1, 0]
    assert progress.rest() == []


def test_a_gone_bucket_is_not_among_the_rest():
    progress = BucketProgress(plan(floats(a=16, b=16), 64))
    assert progress.put(1)
    assert list(progress.due()) == [0]
    assert progress.rest() == [1]
