"""When an operation may start, and what the ranks are told when it may not."""

from __future__ import annotations

import itertools

import pytest

from horo_lite.engine.agreement import Signature, disagreement
from horo_lite.engine.coordinator import JOIN, Coordinator, Key
from horo_lite.interfaces import Reduction

ONE = Signature("allreduce", ("float32",), ((4,),))
A, B = Key("a"), Key("b")


def test_an_operation_starts_when_all_have_asked_in_any_order():
    for order in itertools.permutations(range(3)):
        coordinator = Coordinator((10, 11, 12))
        assert coordinator.ask(order[0], A, ONE) == []
        assert coordinator.ask(order[1], A, ONE) == []
        (verdict,) = coordinator.ask(order[2], A, ONE)
        assert verdict.key == A
        assert verdict.error is None
        assert list(verdict.agreement.signatures) == [0, 1, 2]
        assert coordinator.ask(order[2], A, ONE) == []  # the next one of this name


def test_operations_are_matched_by_name_and_number():
    coordinator = Coordinator((0, 1))
    assert coordinator.ask(0, A, ONE) == []
    assert coordinator.ask(1, B, ONE) == []
    assert coordinator.ask(0, Key("noname", 0), ONE) == []
    assert coordinator.ask(1, Key("noname", 1), ONE) == []
    assert [verdict.key for verdict in coordinator.ask(0, B, ONE)] == [B]
    assert [verdict.key for verdict in coordinator.ask(1, A, ONE)] == [A]
    assert [verdict.key for verdict in coordinator.ask(1, Key("noname", 0), ONE)] == [Key("noname", 0)]


def agreed(coordinator: Coordinator, key: Key, *signatures: Signature):
    verdicts = [coordinator.ask(member, key, signature) for member, signature in enumerate(signatures)]
    (verdict,) = verdicts[-1]
    return verdict.agreement


def test_what_was_agreed_on_is_agreed_on_again_by_its_number():
    coordinator = Coordinator((0, 1))
    first = agreed(coordinator, A, ONE, ONE)
    coordinator.ask(1, A, first)
    (verdict,) = coordinator.ask(0, A, first)
    assert verdict.agreement is first


def test_an_old_agreement_and_a_new_request_are_compared():
    coordinator = Coordinator((0, 1))
    first = agreed(coordinator, A, ONE, ONE)
    coordinator.ask(0, A, first)
    (verdict,) = coordinator.ask(1, A, ONE._replace(shapes=((5,),)))
    assert "shapes" in verdict.error
    assert verdict.agreement is None
    coordinator.ask(0, A, first)
    (verdict,) = coordinator.ask(1, A, ONE)
    assert verdict.error is None
    assert verdict.agreement.number != first.number


def test_two_agreements_of_one_name_do_not_mix():
    coordinator = Coordinator((0, 1))
    gather = Signature("allgather", ("int64",), ((2, 3),))
    other = gather._replace(shapes=((1, 3),))
    first, second = agreed(coordinator, A, gather, gather), agreed(coordinator, A, gather, other)
    coordinator.ask(0, A, first)
    (verdict,) = coordinator.ask(1, A, second)
    assert [s.shapes for s in verdict.agreement.signatures.values()] == [((2, 3),), ((1, 3),)]


def test_join_lets_the_others_go_on_and_says_who_was_last():
    coordinator = Coordinator((4, 6, 9))
    assert coordinator.ask(0, JOIN, Signature("join")) == []
    coordinator.ask(1, A, ONE)
    (verdict,) = coordinator.ask(2, A, ONE)
    assert list(verdict.agreement.signatures) == [1, 2]
    assert verdict.agreement.number is None, "what a joined rank did not ask for is not kept"
    assert coordinator.ask(2, JOIN, Signature("join")) == []
    (verdict,) = coordinator.ask(1, JOIN, Signature("join"))
    assert (verdict.key, verdict.last_joined) == (JOIN, 1)
    assert coordinator.ask(1, A, ONE) == [], "joining is over"


def test_join_decides_what_only_joined_ranks_kept_waiting():
    coordinator = Coordinator((0, 1, 2))
    coordinator.ask(1, A, ONE)
    coordinator.ask(2, A, ONE)
    (verdict,) = coordinator.ask(0, JOIN, Signature("join"))
    assert verdict.key == A


def test_what_was_asked_for_before_joining_takes_place_before_joining_ends():
    """Rank 1 starts an operation without waiting for it and joins; then rank 0 joins, which never asked for it."""
    coordinator = Coordinator((0, 1))
    assert coordinator.ask(1, A, ONE) == []
    assert coordinator.ask(1, JOIN, Signature("join")) == []
    first, second = coordinator.ask(0, JOIN, Signature("join"))
    assert (first.key, list(first.agreement.signatures)) == (A, [1])
    assert (second.key, second.last_joined) == (JOIN, 0)
    assert coordinator.ask(1, A, ONE) == []  # the next one of this name


def test_a_joined_root_has_nothing_to_broadcast():
    coordinator = Coordinator((4, 6))
    coordinator.ask(0, JOIN, Signature("join"))
    (verdict,) = coordinator.ask(1, A, Signature("broadcast", ("int8",), ((1,),), root=4))
    assert verdict.agreement is None
    assert "rank 4 is its root but has called join()" in verdict.error
    (verdict,) = coordinator.ask(1, A, Signature("broadcast", ("int8",), ((1,),), root=6))
    assert verdict.error is None


def test_one_member_decides_alone():
    coordinator = Coordinator((7,))
    (verdict,) = coordinator.ask(0, A, ONE)
    assert verdict.error is None
    (verdict,) = coordinator.ask(0, JOIN, Signature("join"))
    assert verdict.last_joined == 0


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"kind": "allgather"}, ["operations", "allreduce", "allgather"]),
        ({"types": ("int32",)}, ["data types", "float32", "int32"]),
        ({"shapes": ((8,),)}, ["shapes", "(4,)", "(8,)"]),
        ({"shapes": ((4,), (4,)), "types": ("float32", "float32")}, ["numbers of tensors", "1", "2"]),
        ({"device": "cuda"}, ["devices", "cpu", "cuda"]),
        ({"reduction": Reduction.MAX}, ["reduce operations", "Sum", "Max"]),
        ({"root": 1}, ["root ranks", "-1", "1"]),
        ({"prescale": 0.5}, ["prescale factors", "1.0", "0.5"]),
        ({"postscale": 2.0}, ["postscale factors", "2.0"]),
    ],
)
def test_a_difference_names_the_ranks_and_both_values(change, texts):
    text = disagreement("loss", {0: ONE, 2: ONE._replace(**change), 5: ONE})
    for part in ("'loss'", "ranks 0, 5", "rank 2", *texts):
        assert part in text
    assert disagreement("loss", {0: ONE, 2: ONE}) is None


def test_rows_are_free_where_tensors_are_gathered():
    for kind in ("allgather", "alltoall"):
        first = Signature(kind, ("int8",), ((2, 3), (0,)))
        assert disagreement("x", {0: first, 1: first._replace(shapes=((5, 3), (9,)))}) is None
        assert "(5, 4)" in disagreement("x", {0: first, 1: first._replace(shapes=((5, 4), (9,)))})
        assert "shapes" in disagreement("x", {0: first, 1: first._replace(shapes=((2, 3), ()))})


def test_a_fault_of_one_rank_comes_before_all_else():
    text = disagreement("x", {0: ONE, 3: Signature("allgather", fault="no such op"), 4: ONE._replace(root=2)})
    assert text == "tensor 'x': rank 3 could not take part: no such op"


def test_many_ranks_are_not_all_listed():
    signatures = dict.fromkeys(range(40), ONE)
    signatures[17] = ONE._replace(root=3)
    text = disagreement("x", signatures)
    assert "rank 17: 3" in text
    assert len(text) < 200
