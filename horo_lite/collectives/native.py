"""The MPI library's own operations, as a reference to measure against.

They serve a group that is a whole transport, and types and reductions that MPI knows.
"""

from __future__ import annotations

from horo_lite.collectives.registry import Cost, Work, register
from horo_lite.interfaces import Array, Group, Kernel, Native, Reduction, Schedule


def _cost(work: Work) -> Cost:
    """Unknown: what a good library would take."""
    rounds = (work.size - 1).bit_length()
    return Cost(2 * rounds, 0, 0)


@register("allreduce", "native", cost=_cost, wide=False)
def native_allreduce(
    group: Group, buffer: Array, kernel: Kernel, *, reduction: Reduction = Reduction.SUM
) -> Schedule:
    """All-reduce in place by MPI_Allreduce; an average is a sum and the kernel's scale.

    Steps and bytes: the library's, which counts none of them as ours.
    """
    if group.size > 1:
        summed = Reduction.SUM if reduction == Reduction.AVERAGE else reduction
        yield Native("allreduce", buffer, summed, 0)
    kernel.combine(buffer, (buffer,), last=True)


@register("broadcast", "native", cost=_cost)
def native_broadcast(group: Group, buffer: Array, root: int = 0) -> Schedule:
    """Broadcast by MPI_Bcast. Steps and bytes: the library's."""
    if group.size > 1:
        yield Native("broadcast", buffer, Reduction.SUM, group.ranks[root])
