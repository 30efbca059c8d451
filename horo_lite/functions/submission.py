"""How a call becomes an operation: made, handed to the named lane of its process set, and waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horo_lite.context import current
from horo_lite.engine import Handle, NamedLane
from horo_lite.engine.operations import Operation, Refusal
from horo_lite.errors import ArgumentError, ArgumentTypeError
from horo_lite.process_sets import Member, ProcessSet

Make = Callable[[Member], Operation]
"""Makes a rank's part of an operation, or raises ValueError or TypeError for this rank's arguments."""


def call(process_set: ProcessSet, kind: str, name: str | None, make: Make) -> Any:
    """Make an operation, hand it in, wait for it, and return its result.

    Args:
        kind: as the operation's class has it, for what the other ranks are told if ``make`` raises.

    Raises:
        ValueError, TypeError: ``make`` raised; the other ranks hear of it and raise too.
        HorovodInternalError: the operation failed, on this rank or on another.
    """
    lane, operation = made(process_set, kind, name, make)
    return current().engine.call(lane, operation)


def start(process_set: ProcessSet, kind: str, name: str | None, make: Make) -> Handle:
    """Make an operation and hand it in; it goes on in the background. Raises as ``call`` does, for ``make`` alone."""
    lane, operation = made(process_set, kind, name, make)
    lane.submit(operation)
    current().engine.wake()
    return operation.handle


def made(process_set: ProcessSet, kind: str, name: str | None, make: Make) -> tuple[NamedLane, Operation]:
    """The operation and the lane it is for; where it can't be made, the other ranks hear why."""
    context = current()
    if name is not None and not isinstance(name, str):
        raise ArgumentTypeError(f"name={name!r} of {kind}: expected a string or None")
    member = member_of(process_set)
    if member.lane is None:
        raise ArgumentError(
            f"rank {context.rank} is not in {process_set}: only its members may call this (check .included())"
        )
    try:
        return member.lane, make(member)
    except (ValueError, TypeError) as error:
        member.lane.submit(Refusal(kind, name or "", str(error)))
        context.engine.wake()
        if name:
            error.args = (f"tensor {name!r}: {error}",)
        raise


def member_of(process_set: ProcessSet) -> Member:
    """This rank's part of a process set.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        return process_set.member()
    except AttributeError:
        if isinstance(process_set, ProcessSet):
            raise
        raise ArgumentTypeError(
            f"process_set={process_set!r}: expected a ProcessSet, as add_process_set(ranks) returns it"
        ) from None


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous operation and return its result.

    Args:
        handle: what an asynchronous form returned.

    Raises:
        HorovodInternalError: it failed, on this rank or on another.
    """
    return current().engine.wait(handle)


def poll(handle: Handle) -> bool:
    """True when ``synchronize(handle)`` would return at once."""
    return current().engine.poll(handle)
