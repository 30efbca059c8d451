"""All-reduce over nodes of several ranks: most bytes stay within a node, few cross the network.

``nodes`` lists the ranks of each node (the transport's numbers), in the same order on every rank. A
*lane* is one rank of each node; with uneven nodes there are as many lanes as the smallest node has
ranks, and the other ranks of a larger node take part within their node only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horo_lite.collectives.partition import even_counts, offsets_of, segments_of
from horo_lite.collectives.registry import SEGMENT_ELEMENTS, Cost, Work, register
from horo_lite.collectives.ring import ring_allgather, ring_allreduce, ring_reduce_scatter
from horo_lite.interfaces import Array, Group, Kernel, Schedule


class Place(NamedTuple):
    """Where a rank stands among nodes and lanes."""

    node: Group
    lane: Group | None
    """The ranks that reduce the same chunk, one per node; None for a rank without a lane."""
    counts: tuple[int, ...]
    """How many elements each rank of the node has to reduce."""


def place(group: Group, nodes: Sequence[Sequence[int]], elements: int) -> Place:
    """The caller's node and lane, and its node's shares of a buffer of ``elements``."""
    me = group.ranks[group.index]
    home = next(i for i, ranks in enumerate(nodes) if me in ranks)
    node = Group(tuple(nodes[home]), list(nodes[home]).index(me))
    lanes = min(len(ranks) for ranks in nodes)
    counts = even_counts(elements, lanes) + (0,) * (node.size - lanes)
    if node.index >= lanes:
        return Place(node, None, counts)
    return Place(node, Group(tuple(ranks[node.index] for ranks in nodes), home), counts)


def _cost(work: Work) -> Cost:
    """For even nodes of L ranks."""
    lanes = min(work.ranks_per_node, work.size)
    nodes = work.nodes
    chunk = -(-work.elements // lanes)
    piece = -(-chunk // nodes)
    across, within = 2 * (nodes - 1), 2 * (lanes - 1)
    return Cost(
        steps=across,
        messages=across * segments_of(piece, work.segment_elements)
        + within * segments_of(chunk, work.segment_elements),
        sent=across * piece,
        combined=2 * (lanes - 1) * chunk + (2 * (nodes - 1) * piece if nodes > 1 else chunk),
        crossing=lanes * across * piece,
        segments=segments_of(piece, work.segment_elements),
        local_steps=within,
        local_sent=within * chunk,
    )


@register("allreduce", "hierarchical", cost=_cost, wide=False)
def hierarchical_allreduce(
    group: Group,
    buffer: Array,
    kernel: Kernel,
    *,
    nodes: Sequence[Sequence[int]],
    segment_elements: int = SEGMENT_ELEMENTS,
) -> Schedule:
    """All-reduce in place: reduce-scatter in each node, a ring per lane, all-gather in each node.

    With M nodes of L ranks. Steps: 2 (M - 1) across nodes and 2 (L - 1) within. Elements sent per
    rank: 2 (n/L) (M - 1) / M across and 2 n (L - 1) / L within; all lanes of a node together send 2
    n (M - 1) / M, and use the port at once.
    Wins for large messages on nodes of several ranks.
    Source: Jia et al., "Highly scalable deep learning training system with mixed-precision",
    arXiv:1807.11205, 2018.
    """
    node, lane, counts = place(group, nodes, len(buffer))
    yield from ring_reduce_scatter(
        node, buffer, counts, kernel, segment_elements=segment_elements, last=False
    )
    if lane is not None:
        offsets = offsets_of(counts)
        chunk = buffer[offsets[node.index] : offsets[node.index + 1]]
        yield from ring_allreduce(lane, chunk, kernel, segment_elements=segment_elements)
    yield from ring_allgather(node, buffer, counts, segment_elements=segment_elements)
