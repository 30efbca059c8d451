"""What the ranks must agree on before data moves, and the text when they do not.

Every member of a process set describes its operation by a ``Signature``; the coordinator compares them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from horo_lite.interfaces import Compressor, Reduction

Shape = tuple[int, ...]
_OWN = re.compile(r"[\w.]*<locals>\.| at 0x[0-9a-fA-F]+")  # lost by a class that travels by value; of one process


class Described:
    """A compressor, compared by what it says of itself: a user's own may know neither equality nor hash."""

    __slots__ = ("compressor", "text")

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self.text = description(compressor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Described) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def description(compressor: object) -> str:
    """What compressors, or lists of them, say of themselves on every rank alike."""
    return _OWN.sub("", repr(compressor))


class Signature(NamedTuple):
    """One rank's description of an operation on one or several (grouped) arrays."""

    kind: str
    types: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    device: str = "cpu"
    reduction: int = Reduction.SUM
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    compression: Described | None = None
    splits: tuple[int, ...] | None = None  # each rank's own, no agreement needed
    fault: str = ""  # why this rank cannot take part, so that the others hear of it


def disagreement(name: str, signatures: Mapping[int, Signature]) -> str | None:
    """Compare what the ranks asked for under one name.

    Args:
        name: the operation's name.
        signatures: by global rank; joined ranks are left out.

    Returns:
        None when all agree, else a text that names the ranks and both values.
    """
    first = next(iter(signatures.values()))
    for rank, signature in signatures.items():
        if signature.fault:
            return f"tensor {name!r}: rank {rank} could not take part: {signature.fault}"
    for signature in signatures.values():
        if signature == first:
            continue
        for what, read in _COMPARED:
            mine, theirs = read(first), read(signature)
            if mine != theirs:
                return _text(name, what, signatures, read)
    return None


def _free_rows(signature: Signature) -> tuple[Any, ...]:
    """Shapes as far as they must agree: the first dimension of gathered arrays is free."""
    if signature.kind in ("allgather", "alltoall"):
        return tuple(("*", *shape[1:]) if shape else () for shape in signature.shapes)
    return signature.shapes


_COMPARED: list[tuple[str, Callable[[Signature], Any]]] = [
    ("operations", lambda s: s.kind),
    ("numbers of tensors", lambda s: len(s.shapes)),
    ("data types", lambda s: s.types),
    ("shapes", _free_rows),
    ("devices", lambda s: s.device.partition(":")[0]),  # each rank of a node has another GPU
    ("reduce operations", lambda s: s.reduction),
    ("root ranks", lambda s: s.root),
    ("prescale factors", lambda s: s.prescale),
    ("postscale factors", lambda s: s.postscale),
    ("compressors", lambda s: None if s.compression is None else s.compression.text),
]


def _text(
    name: str, what: str, signatures: Mapping[int, Signature], read: Callable[[Signature], Any]
) -> str:
    shown: dict[str, list[int]] = {}
    for rank, signature in signatures.items():
        value: Any = signature.shapes if what == "shapes" else read(signature)
        if what == "reduce operations":
            value = Reduction(value).name.title()
        shown.setdefault(_show(value), []).append(rank)
    groups = "; ".join(f"{_ranks(ranks)}: {value}" for value, ranks in shown.items())
    return f"tensor {name!r}: mismatched {what}: {groups}. Every rank must pass the same."


def _show(value: Any) -> str:
    """A tuple of one is shown as its member, so that the usual single tensor reads plainly."""
    if isinstance(value, tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, tuple) and value and all(isinstance(v, str) for v in value):
        return ", ".join(value)
    return str(value)


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"ranks {shown}"
