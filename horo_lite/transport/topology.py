"""Where the ranks are: which share a node, and the numbers that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Topology(NamedTuple):
    """The layout of a group of ranks, the same on all of them.

    Attributes:
        rank: the caller.
        nodes: the ranks of each node, in ascending order; nodes ordered by their first rank.
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def from_labels(cls, rank: int, labels: Sequence[int | str]) -> Topology:
        """``labels[r]`` names the node of rank r; equal labels share a node."""
        members: dict[int | str, list[int]] = {}
        for member, label in enumerate(labels):
            members.setdefault(label, []).append(member)
        return cls(rank, tuple(tuple(ranks) for ranks in members.values()))

    @property
    def size(self) -> int:
        return sum(len(node) for node in self.nodes)

    @property
    def node_index(self) -> int:
        """The index of the caller's node."""
        return next(i for i, node in enumerate(self.nodes) if self.rank in node)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on the caller's node."""
        return self.nodes[self.node_index]

    @property
    def local_rank(self) -> int:
        return self.local_ranks.index(self.rank)

    @property
    def local_size(self) -> int:
        return len(self.local_ranks)

    @property
    def lane(self) -> tuple[int, ...]:
        """The ranks that have the caller's local rank on their node, one per node that has that many ranks."""
        return tuple(node[self.local_rank] for node in self.nodes if len(node) > self.local_rank)

    @property
    def cross_rank(self) -> int:
        return self.lane.index(self.rank)

    @property
    def cross_size(self) -> int:
        return len(self.lane)

    @property
    def is_homogeneous(self) -> bool:
        """Every node has the same number of ranks."""
        return len({len(node) for node in self.nodes}) == 1

    def within(self, ranks: Sequence[int]) -> Topology:
        """The layout of a subgroup, whose members are numbered 0, 1, ... in the order of ``ranks``."""
        node_of = {rank: index for index, node in enumerate(self.nodes) for rank in node}
        return Topology.from_labels(list(ranks).index(self.rank), [node_of[rank] for rank in ranks])
