"""One bucket: where its gradients lie, and which of them somebody used.

::

    | gradient 0 | gap | gradient 1 | gap | ... | used: one element per gradient, failed, succeeded | gap |
    ^ every piece begins at a multiple of 64 bytes

The *used* region says which gradients were computed in this step, and whether a backward pass broke
off midway, with no message of its own: it is reduced with the rest of the bucket. A rank writes
infinity for what is so on it and 0 for what is not; what is not 0 after the reduction is so
somewhere. A count would do for a plain Sum, but 1 can vanish on its way through a scale factor or a
division by N in 16 bits; infinity survives every sum with zeros, every cast and every factor (times
0 it is NaN, which is not 0 either), for any number of ranks. So a bucket is of a floating-point or
complex type, which gradients are, and is reduced by Sum or Average; Adasum, whose dot products run
over gradients one by one, leaves the region out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from horo_lite.arrays import item_bytes
from horo_lite.interfaces import Array

ALIGNMENT_BYTES = 64
"""A cache line, so that two ranks that write neighbouring gradients do not fight for one."""
_FATES = 2  # elements after those of the gradients


@dataclasses.dataclass(frozen=True)
class GradientSpec:
    """What all ranks must agree on about one gradient.

    Attributes:
        name: unique within a plan.
        shape: its logical shape.
        type_name: its element type, as ``arrays.type_name`` tells it.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(extent) for extent in self.shape))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * item_bytes(self.type_name)

    def __str__(self) -> str:
        return f"{self.type_name} {self.shape}"


@dataclasses.dataclass(frozen=True)
class Slot:
    """A gradient's place: elements ``start`` to ``stop`` of its bucket.

    Attributes:
        spec: the gradient.
        index: its position among the specs the plan was made from.
        start: the first element.
    """

    spec: GradientSpec
    index: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.spec.elements


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Gradients of one type that are reduced together.

    Attributes:
        index: its position in the plan.
        type_name: the element type of all of it.
        slots: the gradients, in the order in which they are expected to be ready.
        used_start: the first element of the used region; gradients and gaps end here.
        elements: the length of the whole bucket.
        offset_bytes: its place in one memory block that holds all buckets of the plan.
    """

    index: int
    type_name: str
    slots: tuple[Slot, ...]
    used_start: int
    elements: int
    offset_bytes: int

    @property
    def nbytes(self) -> int:
        return self.elements * item_bytes(self.type_name)

    def views(self, buffer: Array) -> list[Array]:
        """The gradients of a bucket's flat array, as flat views in the order of ``slots``."""
        return [buffer[slot.start : slot.stop] for slot in self.slots]

    def write_used(self, buffer: Array, used: Sequence[bool], failed: bool | None = False) -> None:
        """Say which gradients this rank has, before the bucket is reduced.

        Args:
            buffer: the bucket's flat array.
            used: one value per slot, in their order.
            failed: how this rank's step went; None where it has none.
        """
        region = buffer[self.used_start : self.used_start + len(self.slots) + _FATES]
        region[:] = math.inf if all(used) else 0
        for place, is_so in enumerate([*used, failed is True, failed is False]):
            if is_so != all(used):
                region[place] = math.inf if is_so else 0

    def read_used(self, buffer: Array) -> tuple[list[bool], bool | None]:
        """From the reduced bucket, which gradients any rank had, one value per slot, and how steps went.

        The latter is False where no rank's failed, True where all did, and None where only some did.
        """
        region = buffer[self.used_start : self.used_start + len(self.slots) + _FATES]
        *used, failed, succeeded = (region != 0).tolist()
        return used, common_fate(failed, succeeded)


def lay_out(index: int, offset_bytes: int, members: Iterable[tuple[int, GradientSpec]]) -> Bucket:
    """Place gradients of one type, given as (index, spec), one after the other."""
    members = tuple(members)
    type_name = members[0][1].type_name
    slots = []
    position = 0
    for number, spec in members:
        slots.append(Slot(spec, number, position))
        position = aligned(position + spec.elements, type_name)
    elements = aligned(position + len(slots) + _FATES, type_name)
    return Bucket(index, type_name, tuple(slots), position, elements, offset_bytes)


def common_fate(failed: bool, succeeded: bool) -> bool | None:
    """Whether the step failed on all ranks, of whether it did on any and whether it did not; None when on some only."""
    return None if failed and succeeded else failed


def aligned(elements: int, type_name: str) -> int:
    """``elements`` rounded up so that what follows begins at a multiple of the alignment."""
    step = ALIGNMENT_BYTES // item_bytes(type_name)
    return -(-elements // step) * step
