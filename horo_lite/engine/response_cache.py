"""What the members agreed on before, so that they ask for it again by a number (Horovod's response cache).

Every member remembers the same agreements at the same verdicts, and so forgets the same ones. It finds few of them by
what it asks for itself, and more by the number in a message, which may have been on its way for a while.
"""

from __future__ import annotations

from horo_lite.engine.agreement import Signature
from horo_lite.engine.coordinator import Agreement

_CAPACITY = 1024
_NUMBERED_CAPACITY = 4 * _CAPACITY


class ResponseCache:
    """One member's agreements.

    Args:
        member: this one, whose own signature an agreement is found by.
    """

    def __init__(self, member: int) -> None:
        self._member = member
        self._by_signature: dict[tuple[str, Signature], Agreement] = {}
        self._by_number: dict[int, Agreement] = {}
        self._newest = 0

    def __bool__(self) -> bool:
        return bool(self._by_number)

    def __contains__(self, number: int | None) -> bool:
        return number in self._by_number

    def __getitem__(self, number: int) -> Agreement:
        """What a message calls by this number."""
        return self._by_number[number]

    def remember(self, agreement: Agreement) -> None:
        """Keep an agreement that is numbered and new; all members do so at the same verdict. The oldest make room."""
        number = agreement.number
        if number is None or number in self._by_number:
            return
        self._by_number[number] = agreement
        self._by_signature[agreement.name, agreement.signatures[self._member]] = agreement
        if len(self._by_signature) > _CAPACITY:
            del self._by_signature[next(iter(self._by_signature))]
        if len(self._by_number) > _NUMBERED_CAPACITY:
            del self._by_number[next(iter(self._by_number))]
        self._newest = number

    def find(self, name: str, signature: Signature, asked: int = 0) -> Agreement | None:
        """What the members agreed on for such an operation, where it may be asked for by its number (``holds``)."""
        known = self._by_signature.get((name, signature))
        return known if known is not None and self.holds(known, asked) else None

    def holds(self, agreement: Agreement, asked: int = 0) -> bool:
        """The coordinator will still know it when a request by number arrives.

        Args:
            asked: the operations this member has asked for. As many new agreements may be made until then, and each
                pushes an old one out.
        """
        number = agreement.number
        return number in self._by_number and self._newest - number + asked < _NUMBERED_CAPACITY
