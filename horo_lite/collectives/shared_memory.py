"""All-reduce through memory that all ranks of a node have mapped: no messages but fences.

Each rank reduces its own slice straight from everyone's buffers, in rank order and all at once (so
wide kernels are served), and reads back the others' slices. A fence is a dissemination barrier of
empty messages; besides keeping the order, it is what makes one rank's writes visible to another.

- *ready*: nobody reduces before all have written their input.
- *reduced*: nobody reads back before all slices are done.
- *read*: nobody writes the next input before all have read this result.

With N ranks and n elements; no element is sent.

Source: of the fences, Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization",
International Journal of Parallel Programming 17(1), 1988.
"""

from __future__ import annotations

from collections.abc import Sequence

from horo_lite.collectives.barrier import dissemination_barrier
from horo_lite.collectives.hierarchical import place
from horo_lite.collectives.partition import even_offsets, offsets_of, segments_of
from horo_lite.collectives.registry import SEGMENT_ELEMENTS, Cost, Work, register
from horo_lite.collectives.ring import ring_allreduce
from horo_lite.interfaces import Array, Group, Kernel, Schedule


def _fences_cost(size: int, fences: int) -> int:
    return fences * (size - 1).bit_length()


def _resident_cost(work: Work) -> Cost:
    rounds = _fences_cost(work.size, 3)
    others = work.size - 1
    return Cost(
        steps=0,
        messages=rounds,
        sent=0,
        combined=work.size * work.chunk,
        copied=others * work.chunk,
        local_steps=rounds,
    )


def _resident_hierarchical_cost(work: Work) -> Cost:
    lanes = min(work.ranks_per_node, work.size)
    nodes = work.nodes
    chunk = -(-work.elements // lanes)
    piece = -(-chunk // nodes)
    across, fence_rounds = 2 * (nodes - 1), _fences_cost(lanes, 3)
    return Cost(
        steps=across,
        messages=across * segments_of(piece, work.segment_elements) + fence_rounds,
        sent=across * piece,
        combined=lanes * chunk + (2 * (nodes - 1) * piece if nodes > 1 else chunk),
        copied=(lanes - 1) * chunk,
        crossing=lanes * across * piece,
        segments=segments_of(piece, work.segment_elements),
        local_steps=fence_rounds,
    )


def _shared_cost(work: Work) -> Cost:
    """With staging areas of three segments."""
    if work.size == 2:
        pieces = segments_of(work.elements, 3 * work.segment_elements // 2)
        n = pieces * -(-work.elements // pieces)
        rounds = pieces + 1
        return Cost(0, rounds, 0, combined=2 * n, copied=n, local_steps=rounds)
    pieces = segments_of(work.elements, work.segment_elements)
    rounds = _fences_cost(work.size, pieces + 2)
    part = pieces * -(-work.elements // (pieces * work.size))
    return Cost(
        steps=0,
        messages=rounds,
        sent=0,
        combined=work.size * part,
        copied=(2 * work.size - 1) * part,
        local_steps=rounds,
    )


@register("resident_allreduce", "flat", cost=_resident_cost, one_node=True)
def resident_allreduce(
    group: Group, mine: Array, peers: Sequence[Array], kernel: Kernel
) -> Schedule:
    """All-reduce in place of buckets that all ranks of the node have mapped.

    Args:
        mine: this rank's bucket.
        peers: all members' buckets in order, this rank's own (``mine`` or another mapping of it)
            included.

    Steps: 3 fences of ceil(log2 N) empty messages. Sent: nothing. A rank reads n elements to reduce
    and n (N - 1) / N to read back, and writes n. Wins on one node wherever the buckets can be
    shared.
    """
    offsets = even_offsets(len(mine), group.size)
    yield from dissemination_barrier(group)  # ready
    _reduce_slice(group, mine, peers, offsets, kernel, last=True)
    yield from dissemination_barrier(group)  # reduced
    _read_back(group, mine, peers, offsets, kernel)
    yield from dissemination_barrier(group)  # read


@register("resident_allreduce", "hierarchical", cost=_resident_hierarchical_cost, wide=False)
def resident_hierarchical_allreduce(
    group: Group,
    mine: Array,
    peers: Sequence[Array],
    kernel: Kernel,
    *,
    nodes: Sequence[Sequence[int]],
    segment_elements: int = SEGMENT_ELEMENTS,
) -> Schedule:
    """The same over several nodes: reduce slices in memory, one ring per lane, read back.

    Args:
        peers: the buckets of the ranks of this rank's node, in the node's order.
        nodes: the ranks of each node; with uneven nodes the smallest says how many lanes there are.

    With M nodes of L ranks. Steps: 2 (M - 1) across nodes and 3 fences within. Elements sent per
    rank: 2 (n / L) (M - 1) / M.
    Wins on several nodes wherever the buckets can be shared: two ranks a node take no longer than
    one.
    """
    node, lane, counts = place(group, nodes, len(mine))
    offsets = offsets_of(counts)
    yield from dissemination_barrier(node)  # ready
    _reduce_slice(node, mine, peers, offsets, kernel, last=False)
    if lane is not None:
        chunk = mine[offsets[node.index] : offsets[node.index + 1]]
        yield from ring_allreduce(lane, chunk, kernel, segment_elements=segment_elements)
    yield from dissemination_barrier(node)  # reduced
    _read_back(node, mine, peers, offsets, kernel)
    yield from dissemination_barrier(node)  # read


@register("allreduce", "shared", cost=_shared_cost, one_node=True)
def shared_allreduce(
    group: Group, buffer: Array, kernel: Kernel, *, staging: Sequence[Array]
) -> Schedule:
    """All-reduce in place of ordinary memory, through a smaller staging area of each rank.

    Args:
        staging: all members' staging areas in order, of one length of at least 3 elements, mapped
            by all and of the
            buffer's type.

    The buffer passes in P pieces of a third of the area, which should fit a cache. While others
    still reduce piece k, a rank copies in piece k+1; while others still read back piece k, it
    reduces piece k+1 and copies in piece k+2. That takes three areas in turn, but one fence a
    piece: it says at once that piece k is reduced, that piece k+1 is ready and that piece k-1 was
    read, whose area then takes piece k+2.

    Steps: P + 2 fences of ceil(log2 N) empty messages. Sent: nothing. Beside the reduction each
    rank copies n (N - 1) / N elements in and n out. Wins on one node for all but the smallest
    messages.

    Two ranks reduce each other's pieces whole, so that none is read back: one fence fewer, half an
    area a piece, and n elements copied in are all the copies.
    """
    if group.size == 1:
        kernel.combine(buffer, (buffer,), last=True)
        return
    if group.size == 2:
        yield from _shared_by_two(group, buffer, kernel, staging)
        return
    piece_elements = len(staging[group.index]) // 3
    pieces = segments_of(len(buffer), piece_elements)
    bounds = even_offsets(len(buffer), pieces)

    def piece_of(k: int) -> tuple[Array, list[Array], tuple[int, ...]]:
        """Piece k of the buffer, everyone's staging area for it, and the slices of its owners."""
        piece = buffer[bounds[k] : bounds[k + 1]]
        start = k % 3 * piece_elements
        return (
            piece,
            [area[start : start + len(piece)] for area in staging],
            even_offsets(len(piece), group.size),
        )

    def copy_in(k: int) -> None:
        piece, areas, _ = piece_of(k)
        lay_out(group, piece, areas, kernel)

    copy_in(0)
    yield from dissemination_barrier(group)  # ready
    for k in range(pieces):
        piece, areas, offsets = piece_of(k)
        low, high = offsets[group.index], offsets[group.index + 1]
        inputs = [area[low:high] for area in areas]
        inputs[group.index] = piece[low:high]
        kernel.combine(areas[group.index][low:high], inputs, last=True)
        if k + 1 < pieces:
            copy_in(k + 1)
        yield from dissemination_barrier(group)  # reduced, and the next one is ready
        for member, area in enumerate(areas):
            part = slice(offsets[member], offsets[member + 1])
            kernel.copy(piece[part], area[part])
    yield from dissemination_barrier(group)  # read


def _shared_by_two(
    group: Group, buffer: Array, kernel: Kernel, staging: Sequence[Array]
) -> Schedule:
    """``shared_allreduce`` for two ranks.

    A fence says that piece k was read by both, and that piece k+1 is ready: piece k+2 then takes the
    area of piece k.
    """
    half_elements = len(staging[group.index]) // 2
    pieces = segments_of(len(buffer), half_elements)
    bounds = even_offsets(len(buffer), pieces)

    def piece_of(k: int) -> tuple[Array, list[Array]]:
        piece = buffer[bounds[k] : bounds[k + 1]]
        start = k % 2 * half_elements
        return piece, [area[start : start + len(piece)] for area in staging]

    def copy_in(k: int) -> None:
        piece, areas = piece_of(k)
        kernel.copy(areas[group.index], piece)

    copy_in(0)
    yield from dissemination_barrier(group)  # ready
    for k in range(pieces):
        piece, areas = piece_of(k)
        areas[group.index] = piece
        kernel.combine(piece, areas, last=True)
        if k + 1 < pieces:
            copy_in(k + 1)
        yield from dissemination_barrier(group)  # read, and the next one is ready


def lay_out(
    group: Group, values: Array, areas: Sequence[Array], kernel: Kernel, whole: bool = False
) -> None:
    """Copy to this rank's own area what others will reduce: all but its own slice, or the ``whole``."""
    own = areas[group.index]
    if whole:
        kernel.copy(own, values)
        return
    offsets = even_offsets(len(values), group.size)
    low, high = offsets[group.index], offsets[group.index + 1]
    kernel.copy(own[:low], values[:low])
    kernel.copy(own[high:], values[high:])


def laid_out_allreduce(
    group: Group,
    values: Array,
    target: Array,
    areas: Sequence[Array],
    kernel: Kernel,
    whole: bool = False,
) -> Schedule:
    """The rest of an all-reduce, once every member is known to have laid its values out.

    Args:
        target: where the result goes; it may be ``values``.
        areas: all members' areas in order, as long as the values.
        whole: each member reduces everything by itself, and all do the same in the same order. A rank then
            reads n N elements instead of n (2 N - 1) / N, and waits for nobody: the quicker way while a
            fence takes longer than that.

    Steps: 1 fence of ceil(log2 N) empty messages, with ``whole`` none. Sent: nothing. How the members know is
    the *ready* fence. In place of the *read* fence the next all-reduce, which has slices of other lengths,
    lies in other areas: once every member is known to have laid that one out, all have ended this one, and
    its areas may serve the one after the next.
    """
    if whole:
        inputs = list(areas)
        inputs[group.index] = values
        kernel.combine(target, inputs, last=True)
        return
    offsets = even_offsets(len(values), group.size)
    own = slice(offsets[group.index], offsets[group.index + 1])
    inputs = [area[own] for area in areas]
    inputs[group.index] = values[own]
    kernel.combine(areas[group.index][own], inputs, last=True)
    yield from dissemination_barrier(group)  # reduced
    for member, area in enumerate(areas):
        part = slice(offsets[member], offsets[member + 1])
        kernel.copy(target[part], area[part])


def _reduce_slice(
    group: Group,
    mine: Array,
    peers: Sequence[Array],
    offsets: Sequence[int],
    kernel: Kernel,
    last: bool,
) -> None:
    """Reduce this rank's slice from all buffers into its own one."""
    part = slice(offsets[group.index], offsets[group.index + 1])
    inputs = [peer[part] for peer in peers]
    inputs[group.index] = mine[part]
    kernel.combine(mine[part], inputs, last)


def _read_back(
    group: Group, mine: Array, peers: Sequence[Array], offsets: Sequence[int], kernel: Kernel
) -> None:
    """Copy the others' slices, the next member's first, so that not all read the same one."""
    for distance in range(1, group.size):
        member = (group.index + distance) % group.size
        part = slice(offsets[member], offsets[member + 1])
        kernel.copy(mine[part], peers[member][part])
