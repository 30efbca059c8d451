"""Where a rank is among its planned operations, and how a message's tag says so."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Place(NamedTuple):
    """Where a rank is: the number of a plan, a step of it, a bucket. Plan 0 is the making of a new plan."""

    plan: int
    step: int
    bucket: int


class Plan(Protocol):
    """What the lane knows of a plan: its label and number, and how a joined rank takes part in it.

    ``in_use``: this rank may still step it.
    """

    label: str
    number: int
    in_use: bool

    def take_part(self, step: int, bucket: int) -> None:
        """Submit a bucket for which this rank has nothing, as other ranks do theirs."""
        ...


class Tagging:
    """Places as message tags and back, as far as a tag's bits go.

    Args:
        max_tag: the transport's; at least 2**15 - 1, as MPI guarantees.

    Attributes:
        alarm: the tag of an alarm (``desync``); a place in plan 0 that is never reached.
        call: likewise, of a call.
    """

    def __init__(self, max_tag: int) -> None:
        bits = (max_tag + 1).bit_length() - 1
        self._step_bits = bits // 4
        self._bucket_bits = bits * 2 // 5
        self._plan_bits = bits - self._step_bits - self._bucket_bits
        self.alarm = (1 << self._step_bits + self._bucket_bits) - 1
        self.call = self.alarm - 1

    def tag(self, place: Place) -> int:
        """The tag of a place; only plan 0 has plan bits of 0."""
        step = place.step & ((1 << self._step_bits) - 1)
        bucket = place.bucket & ((1 << self._bucket_bits) - 1)
        return (self.plan_bits(place.plan) << self._step_bits | step) << self._bucket_bits | bucket

    def place(self, tag: int) -> Place:
        """The place of a tag, its numbers modulo what fits."""
        bucket = tag & ((1 << self._bucket_bits) - 1)
        step = tag >> self._bucket_bits & ((1 << self._step_bits) - 1)
        return Place(tag >> self._bucket_bits + self._step_bits, step, bucket)

    def plan_bits(self, number: int) -> int:
        """What messages call a plan."""
        return number and 1 + (number - 1) % ((1 << self._plan_bits) - 1)
