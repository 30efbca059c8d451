"""``horo-lite simulate``: a ring's messages worked out by hand; every algorithm is exact on many layouts."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from horo_lite.cli.main import main
from horo_lite.cli.simulate import Example, explained, play, playable
from horo_lite.transport.network_model import NetworkModel


def simulate(*words: str):
    return CliRunner().invoke(main, ["simulate", *words], terminal_width=120)


@pytest.mark.parametrize("ranks_per_node", [1, 2, 3, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("elements", [0, 1, 1000])
def test_every_algorithm_is_exact_and_its_messages_are_seen(ranks, ranks_per_node, elements):
    example = Example(ranks, elements, NetworkModel(ranks_per_node=ranks_per_node))
    entries = playable(example)
    assert ("shared" in entries) == (ranks <= ranks_per_node)
    for entry in entries.values():
        played = play(entry, example)
        assert played.exact
        for rank in range(ranks):
            own = [message for message in played.messages if message.source == rank]
            assert len(own) == played.outcome.messages[rank]
            assert sum(message.size_bytes for message in own) == played.outcome.sent_bytes[rank]


def test_a_ring_message_by_message():
    """3 ranks, 3 elements each: 2 steps to add a chunk and 2 to hand it on, each of 1 element to the next rank."""
    network = NetworkModel(latency_s=10e-6, bandwidth=1e6, overhead_s=0.0, reduce_rate=float("inf"))
    messages = play(playable(Example(3, 3, network))["ring"], Example(3, 3, network)).messages
    assert [(m.source, m.target, m.size_bytes) for m in messages] == 4 * [(0, 1, 4), (1, 2, 4), (2, 0, 4)]
    for step in range(4):  # a latency and 4 bytes at 1 byte a microsecond
        for message in messages[3 * step : 3 * step + 3]:
            assert message.start_s == pytest.approx(step * 14e-6)
            assert message.arrival_s == pytest.approx((step + 1) * 14e-6)


def test_the_command_compares_and_lists():
    done = simulate("-np", "4", "--elements", "16", "--latency-us", "50")
    assert done.exit_code == 0, done.output
    assert "exact on all ranks" in done.output
    rows = dict(re.findall(r"│ (\w+) +│[^│]+│ +(\d+) │", done.output))
    assert rows["ring"] == "6" and rows["recursive_doubling"] == "2"  # 2 (N - 1), and log2 N
    done = simulate("-np", "3", "--elements", "3", "--algorithm", "ring")
    assert done.output.count("│ rank 0 │ rank 1 │     4 │") == 4


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    done = simulate("-np", "2", "--elements", "4", "--plot", str(tmp_path / "messages.png"))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "messages.png").read_bytes().startswith(b"\x89PNG")
    done = simulate("-np", "2", "--elements", "4", "--plot", str(tmp_path / "messages.nonsense"))
    assert done.exit_code == 1 and "cannot be written" in done.output


def test_every_algorithm_is_explained_by_its_steps_and_source():
    for entry in playable(Example(4, 4, NetworkModel(ranks_per_node=4))).values():
        lines = explained(entry).splitlines()
        said = " ".join(lines)
        assert "Steps: " in said and "Wins " in said and "Source: " in said, entry.name
        assert "Args:" not in said and max(map(len, lines)) <= 78, entry.name
        assert ("doubling" in entry.name) == ("P is the largest power of two" in said), entry.name


def test_an_algorithm_named_twice_is_shown_once():
    done = simulate("-np", "3", "--elements", "3", "--algorithm", "ring", "--algorithm", "ring")
    assert done.output.count("with N = 3 ranks and n = 3 elements") == 1
    assert done.output.count("Patarasuk") == 1


def test_what_cannot_be_is_said():
    for name, why in {
        "shared": "'shared' needs all ranks on one node: --ranks-per-node 4",
        "native": "'native' is the MPI library's own",
        "rings": "there is no all-reduce 'rings'",
    }.items():
        done = simulate("--algorithm", name)
        assert done.exit_code == 2 and why in done.output and "there are here: recursive_doubling" in done.output
    assert simulate("-np", "4", "--ranks-per-node", "4", "--algorithm", "shared").exit_code == 0
    assert simulate("-np", "0").exit_code == 2
