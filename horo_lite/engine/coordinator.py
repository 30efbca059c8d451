"""Decides, on the first member of a process set, when an operation may start: when all members have asked for it.

Pure bookkeeping: it is told what each member asks for and returns verdicts, and never touches a transport, so that
unit tests feed it any order of events. One request and one reply per member and operation.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from horo_lite.engine.agreement import Signature, disagreement
from horo_lite.engine.handles import JOIN_NAME


class Key(NamedTuple):
    """How operations of different ranks are matched: by name, unnamed ones also by their number."""

    name: str
    counter: int = -1

    def __str__(self) -> str:
        return self.name if self.counter < 0 else f"{self.name}.{self.counter}"


class Agreement:
    """What all members agreed on once; from then on they ask for it by its number.

    Attributes:
        number: the same on every member; None where it is not kept (a member had joined).
        signatures: by member; joined members are missing.
    """

    __slots__ = ("name", "number", "signatures")

    def __init__(self, name: str, signatures: dict[int, Signature], number: int | None = None) -> None:
        self.name = name
        self.signatures = signatures
        self.number = number


class Verdict(NamedTuple):
    """What the members do about one operation.

    Attributes:
        key: the operation.
        agreement: what takes place; None when nothing does.
        error: why it does not take place.
        last_joined: for the end of ``join()``: the member that joined last.
    """

    key: Key
    agreement: Agreement | None
    error: str | None = None
    last_joined: int = -1


JOIN = Key(JOIN_NAME)


class Coordinator:
    """The table of operations that some members have asked for.

    Args:
        ranks: the global rank of each member, for messages.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._size = len(ranks)
        self._table: dict[Key, dict[int, Signature | Agreement]] = {}
        self._joined: list[int] = []
        self._last: tuple[int, int] = (-1, -1)  # operations of the planned lane, and who did them
        self._numbers = itertools.count()

    def ask(self, member: int, key: Key, asked: Signature | Agreement) -> list[Verdict]:
        """``member`` is ready for an operation, new or agreed on before. Returns what can be decided now."""
        if key == JOIN:
            return self._join(member, asked.root if isinstance(asked, Signature) else 0)
        members = self._table.setdefault(key, {})
        members[member] = asked
        if len(members) + len(self._joined) < self._size:
            return []
        verdict = self._decide(key)
        return [] if verdict is None else [verdict]

    def _join(self, member: int, planned: int) -> list[Verdict]:
        self._joined.append(member)
        if planned >= self._last[0]:
            self._last = planned, member
        verdicts = [self._decide(key) for key in list(self._table)]
        decided = [verdict for verdict in verdicts if verdict is not None]
        if len(self._joined) == self._size:
            decided.append(Verdict(JOIN, None, last_joined=self._last[1]))
            self._joined.clear()
            self._last = -1, -1
        return decided

    def _decide(self, key: Key) -> Verdict | None:
        members = self._table[key]
        if len(members) + sum(member not in members for member in self._joined) < self._size:
            return None
        del self._table[key]
        first = next(iter(members.values()))
        complete = len(members) == self._size
        if complete and isinstance(first, Agreement) and all(a is first for a in members.values()):
            return Verdict(key, first)
        signatures = {
            member: asked.signatures[member] if isinstance(asked, Agreement) else asked
            for member, asked in sorted(members.items())
        }
        error = disagreement(str(key), {self._ranks[m]: s for m, s in signatures.items()})
        if error is None and not complete:
            error = self._absent_root(key, signatures)
        if error is not None:
            return Verdict(key, None, error)
        number = next(self._numbers) if complete else None
        return Verdict(key, Agreement(key.name, signatures, number))

    def _absent_root(self, key: Key, signatures: dict[int, Signature]) -> str | None:
        root = next(iter(signatures.values())).root
        absent = [self._ranks[m] for m in self._joined if m not in signatures]
        if root not in absent:
            return None
        return (
            f"tensor {str(key)!r}: rank {root} is its root but has called join(): it has nothing to send"
        )
