"""The table that chooses: sensible where nothing was measured, exact where something was, the same
as text."""

from __future__ import annotations

import dataclasses
import json

import pytest

from horo_lite.collectives import Work, algorithm, algorithms, operations
from horo_lite.collectives.selection import Machine, Row, Table, estimate_s
from horo_lite.errors import ArgumentError

MEASURED = Row("allreduce", 4, 2, False, ((1000, "recursive_doubling"), (5000, "ring")))


@pytest.mark.parametrize(
    ("size_bytes", "wide", "expected"),
    [
        (256, False, "recursive_doubling"),
        (64 << 20, False, "ring"),
        (256, True, "gathered"),
        (64 << 20, True, "pairwise"),
    ],
)
def test_between_single_ranks_small_messages_save_steps_and_large_ones_bytes(
    size_bytes: int, wide: bool, expected: str
) -> None:
    assert Table().choose("allreduce", size_bytes, ranks=8, wide=wide) == expected


def test_nodes_and_shared_memory_are_used_where_the_caller_has_them() -> None:
    large = 16 << 20
    one_node = {"ranks": 4, "ranks_per_node": 4}
    assert Table().choose("allreduce", large, **one_node) == "ring"
    assert Table().choose("allreduce", large, **one_node, context=["staging"]) == "shared"
    two_nodes = {"ranks": 8, "ranks_per_node": 4}
    assert Table().choose("allreduce", large, **two_nodes, context=["nodes"]) == "hierarchical"
    # Staging of one node does not serve ranks of several.
    context = ["nodes", "staging"]
    assert Table().choose("allreduce", large, **two_nodes, context=context) == "hierarchical"
    assert Table().choose("resident_allreduce", large, **one_node, context=context) == "flat"
    assert (
        Table().choose("resident_allreduce", large, **two_nodes, context=context) == "hierarchical"
    )


def test_every_operation_has_a_choice_on_every_layout() -> None:
    for operation in operations():
        for ranks, ranks_per_node in ((1, 1), (2, 1), (3, 3), (6, 2), (1024, 8)):
            for size_bytes in (0, 1, 1000, 1 << 33):
                name = Table().choose(
                    operation,
                    size_bytes,
                    ranks=ranks,
                    ranks_per_node=ranks_per_node,
                    context=["nodes"],
                )
                assert name in algorithms(operation) and name != "native"


def test_what_was_measured_is_chosen_up_to_its_limits_and_the_last_beyond() -> None:
    table = Table((MEASURED,))
    layout = {"ranks": 4, "ranks_per_node": 2, "context": ["nodes"]}
    names = [table.choose("allreduce", size, **layout) for size in (0, 1000, 1001, 5000, 1 << 30)]
    assert names == ["recursive_doubling", "recursive_doubling", "ring", "ring", "ring"]
    assert table.limits("allreduce", **layout) == MEASURED.limits
    other = {"ranks": 4, "ranks_per_node": 1}
    assert table.limits("allreduce", **other) == Table().limits("allreduce", **other)


def test_a_measured_row_that_cannot_serve_gives_way_to_estimates() -> None:
    table = Table((Row("allreduce", 4, 4, False, ((1 << 30, "shared"),)),))
    layout = {"ranks": 4, "ranks_per_node": 4}
    assert table.choose("allreduce", 10, **layout, context=["staging"]) == "shared"
    assert table.choose("allreduce", 10, **layout) == "recursive_doubling"


def test_a_name_overrides_wherever_it_can_serve() -> None:
    table = Table()
    assert table.choose("allreduce", 10, ranks=4, override="ring") == "ring"
    assert table.choose("allreduce", 10, ranks=4, override="native") == "native"
    # A ring would round 16-bit sums at every hop.
    assert table.choose("allreduce", 10, ranks=4, wide=True, override="ring") == "gathered"
    assert table.choose("allreduce", 10, ranks=4, override="hierarchical") == "recursive_doubling"


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(
        ArgumentError, match=r"'rings'; there are: gathered, halving_doubling, .*shared"
    ):
        Table().choose("allreduce", 10, ranks=4, override="rings")
    with pytest.raises(ArgumentError, match="no operation"):
        Table().choose("scan", 10, ranks=4)
    with pytest.raises(ArgumentError, match="'rings'"):
        Table((dataclasses.replace(MEASURED, limits=((10, "rings"),)),))
    with pytest.raises(ArgumentError, match="limits that rise"):
        Table((dataclasses.replace(MEASURED, limits=((10, "ring"), (10, "pairwise"))),))


def test_a_table_is_the_same_after_a_trip_as_text() -> None:
    table = Table((MEASURED,), Machine(latency_s=1e-3))
    again = Table.from_json(table.to_json())
    assert again == table
    assert again.choose("allreduce", 1001, ranks=4, ranks_per_node=2) == "ring"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 9}',
        '{"format": 2, "rows": [{}], "machine": {}}',
        '{"format": 2, "rows": 3}',
    ],
)
def test_text_that_is_no_table_is_an_error(text: str) -> None:
    with pytest.raises(ArgumentError, match="selection table"):
        Table.from_json(text)


def test_a_table_of_another_release_s_algorithms_is_an_error() -> None:
    content = json.loads(Table((MEASURED,)).to_json())
    content["rows"][0]["limits"][0][1] = "gone"
    with pytest.raises(ArgumentError, match="'gone'"):
        Table.from_json(json.dumps(content))


def test_estimates_grow_with_bytes_and_ranks() -> None:
    machine = Machine()
    for operation in operations():
        for name, entry in algorithms(operation).items():
            if name in ("native", "dissemination"):
                continue
            small = estimate_s(entry, Work(1 << 10, 8, 8), machine)
            assert small < estimate_s(entry, Work(1 << 24, 8, 8), machine), (operation, name)
    ring = algorithm("allreduce", "ring")
    assert estimate_s(ring, Work(64, 8), machine) < estimate_s(ring, Work(64, 16), machine)
