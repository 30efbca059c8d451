"""What is made once of an operation that was agreed on, for the short way (``short_way``).

What all its messages begin with and, of an all-reduce, the arithmetic and the memory of its values: where they travel,
views of the mailbox; where they are laid out, views of the memory that the node's ranks share.
"""

from __future__ import annotations

import math

from horo_lite.arrays import kernel, numpy_dtype
from horo_lite.engine.agreement import Signature
from horo_lite.engine.control import LAID_OUT, NUMBERED, PLAIN
from horo_lite.engine.coordinator import Agreement
from horo_lite.engine.fabric import Fabric
from horo_lite.interfaces import Array, Mailbox, Reduction

_WHOLE_BYTES = 512 << 10
"""A rank that reduces everything reads more than one that reduces a slice, once there are more than two of them. Up to
so much more, that takes less time than another fence."""


class Prepared:
    """An operation that was agreed on, and nothing goes along with its request.

    Attributes:
        mark: the first byte of its messages.
        header: what its messages begin with, where it has a name of its own.
    """

    mark = PLAIN

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self.header = self.numbered(-1)

    def numbered(self, counter: int) -> bytes:
        """The header of an unnamed one, which a counter tells from others of its kind."""
        return NUMBERED.pack(self.mark, self.agreement.number, counter)


class PreparedAllReduce(Prepared):
    """What both forms of an all-reduce keep."""

    def __init__(self, agreement: Agreement, signature: Signature, size: int) -> None:
        super().__init__(agreement)
        self.dtype = numpy_dtype(signature.types[0])
        self.dense_bytes = math.prod(signature.shapes[0]) * self.dtype.itemsize
        self.kernel = kernel(signature.types[0], Reduction(signature.reduction), size, 1.0, signature.postscale)


class Travelling(PreparedAllReduce):
    """An all-reduce whose values travel with its request.

    Attributes:
        outgoing: its values in the mailbox's memory.
        incoming: the values that the mailbox has received.
        arrived: each member's values, where not all come at once.
    """

    def __init__(
        self, agreement: Agreement, signature: Signature, size: int, mailbox: Mailbox, shelves: Array
    ) -> None:
        super().__init__(agreement, signature, size)
        self.message_bytes = NUMBERED.size + self.dense_bytes
        self.outgoing: Array = mailbox.outgoing[NUMBERED.size : self.message_bytes].view(self.dtype)
        self.incoming: Array = mailbox.incoming[NUMBERED.size : self.message_bytes].view(self.dtype)
        self.arrived: list[Array] = [shelf[: self.dense_bytes].view(self.dtype) for shelf in shelves]
        self.combine = self.kernel.combine_block


class LaidOut(PreparedAllReduce):
    """An all-reduce whose values lie in shared memory before it is asked for.

    Attributes:
        areas: for each of two turns, the memory of all members.
        whole: every member reduces everything.
    """

    mark = LAID_OUT

    def __init__(self, agreement: Agreement, signature: Signature, fabric: Fabric) -> None:
        super().__init__(agreement, signature, fabric.size)
        self.areas = [
            [area[: self.dense_bytes].view(self.dtype) for area in areas] for areas in fabric.laid_out_areas
        ]
        self.whole = (fabric.size - 2) * self.dense_bytes <= _WHOLE_BYTES
