"""What an operation is: asked for by a signature, done by a schedule, ending in a result."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, ClassVar

import numpy as np

from horo_lite.arrays import device_name, is_torch, type_name
from horo_lite.engine.agreement import Shape, Signature
from horo_lite.engine.coordinator import JOIN, Key
from horo_lite.engine.fabric import Fabric
from horo_lite.engine.handles import Handle
from horo_lite.interfaces import Array, Schedule

Signatures = dict[int, Signature]
"""What each member asked for; members that have joined are missing."""


def new_tensor(shape: Shape, like: Any) -> Any:
    """An uninitialised tensor of the framework, type and device of ``like``, in the machine's byte order."""
    if is_torch(like):
        return like.new_empty(shape, requires_grad=False)
    return np.empty(shape, like.dtype if like.dtype.isnative else like.dtype.newbyteorder("="))


def described(tensors: Sequence[Any]) -> tuple[tuple[str, ...], tuple[Shape, ...], str]:
    """The types, the shapes and the device of an operation's tensors, in the order in which a signature has them."""
    types = tuple([type_name(tensor) for tensor in tensors])
    shapes = tuple([tuple(tensor.shape) for tensor in tensors])
    return types, shapes, device_name(tensors[0]) if tensors else "cpu"


class Operation:
    """One operation on this rank, from submission to result.

    Args:
        name: what it is matched by; "" for an unnamed one, which is numbered by its lane.
        signature: what the ranks compare.
    """

    kind: ClassVar[str]
    chooses: ClassVar[bool] = True
    """Picks one of several algorithms."""

    def __init__(self, name: str, signature: Signature) -> None:
        self.key = Key(name)
        self.signature = signature
        self.handle = Handle(name)

    def schedule(self, signatures: Signatures, fabric: Fabric) -> tuple[Schedule, bool]:
        """What this rank does, and whether it needs the fabric's staging memory to itself."""
        raise NotImplementedError

    def number(self, key: Key) -> None:
        """Called by the lane for an unnamed operation."""
        self.key = key
        self.handle.name = str(key)

    def values(self) -> Array | None:
        """This rank's values, flat, where they can be reduced in one go without a schedule of their own; else None."""
        return None

    def target(self, fabric: Fabric) -> Array:
        """Where the result of ``values`` is to be written, in place of a schedule."""
        raise NotImplementedError

    def result(self) -> Any:
        """Called once the schedule has ended."""
        return None


class Barrier(Operation):
    """Go on when every rank has arrived."""

    kind = "barrier"
    chooses = False

    def __init__(self, name: str) -> None:
        super().__init__(name, Signature(self.kind))

    def schedule(self, signatures: Signatures, fabric: Fabric) -> tuple[Schedule, bool]:
        return _nothing(), False  # the agreement was the barrier


def _nothing() -> Generator[Any, Any, None]:
    return
    yield


class Join(Operation):
    """This rank is out of data and takes part in everything until all ranks have joined. Result: the last to join.

    Args:
        planned: the operations of the planned lane before it, since their messages can overtake this one.
    """

    kind = "join"

    def __init__(self, planned: int = 0) -> None:
        super().__init__(JOIN.name, Signature(self.kind, root=planned))


class Refusal(Operation):
    """Tells the other ranks why this one cannot take part, so that they raise instead of waiting."""

    def __init__(self, kind: str, name: str, fault: str) -> None:
        super().__init__(name, Signature(kind, fault=fault))
