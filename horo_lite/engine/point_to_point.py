"""Messages between two ranks: what a model that is cut over ranks is connected with.

They share the named lane's message space, in the upper half of its tags. Each is two messages: a header that says
type and shape, so that a receiver that expects something else says so and does not read garbage, and the values.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from horo_lite.arrays import item_bytes
from horo_lite.engine.handles import Handle, Pending
from horo_lite.errors import (
    ArgumentError,
    DisagreementError,
    HorovodInternalError,
    PeerLostError,
    ShutDownError,
)
from horo_lite.interfaces import Array, Recv, Schedule, Send, Transport, Wait
from horo_lite.transport.driver import Running

_HEADER_BYTES = 256


class Envelope(NamedTuple):
    """What a header says.

    Attributes:
        differentiable: the sender waits for a gradient.
    """

    type_name: str
    shape: tuple[int, ...]
    differentiable: bool

    def packed(self) -> Array:
        """As the bytes of a header."""
        text = f"{int(self.differentiable)} {self.type_name} {','.join(map(str, self.shape))}".encode()
        if len(text) > _HEADER_BYTES:
            raise ArgumentError(f"send of a tensor of {len(self.shape)} dimensions: too many")
        return np.frombuffer(text.ljust(_HEADER_BYTES), np.uint8)

    @classmethod
    def unpacked(cls, header: Array) -> Envelope:
        """From the bytes of a header."""
        differentiable, type_name, *shape = header.tobytes().decode().split()
        return cls(type_name, tuple(int(n) for n in shape[0].split(",")) if shape else (), differentiable == "1")


class PointToPointLane:
    """The messages between this rank and each other one.

    Args:
        transport: the named lane's, whose lower tags are taken.
        ranks: the global rank of each member.
    """

    joined = False

    def __init__(self, transport: Transport, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._transport = transport
        self._first_tag = transport.max_tag // 2 + 1
        # One at a time per line, since the messages of two would be taken for one another.
        self._lines: dict[tuple[bool, int, int], deque[tuple[Running, Handle]]] = {}
        self._submitted: deque[tuple[bool, int, int, Schedule, Handle]] = deque()

    @property
    def tags(self) -> int:
        """How many tags there are, from 0."""
        return self._transport.max_tag - self._first_tag

    def send(self, values: Array, envelope: Envelope, peer: int, tag: int) -> Handle:
        """Begin to send; ``values`` are bytes that nobody writes to any more."""
        return self._submit(True, peer, tag, _sending(values, envelope, peer), f"send to rank {self.ranks[peer]}")

    def recv(self, values: Array, envelope: Envelope, peer: int, tag: int) -> Handle:
        """Begin to receive into ``values``, bytes of what ``envelope`` says; the result is the sender's envelope."""
        what = f"recv from rank {self.ranks[peer]}"
        return self._submit(False, peer, tag, _receiving(values, envelope, peer, f"{what}, tag {tag // 2}"), what)

    def _submit(self, sends: bool, peer: int, tag: int, schedule: Schedule, what: str) -> Handle:
        handle = Handle(f"{what}, tag {tag // 2}{' (gradient)' if tag % 2 else ''}")
        self._submitted.append((sends, peer, tag, schedule, handle))
        return handle

    @property
    def idle(self) -> bool:
        return not (self._submitted or self._lines)

    def pending(self) -> list[Pending]:
        """The first of each line; for the watch, whose thread does not hold the engine's lock."""
        heads = [line[0][1] for line in list(self._lines.values()) if line]
        return [Pending(handle.name, "point to point", handle.waiting, True, False) for handle in heads]

    def progress(self) -> bool:
        """Do all that can be done without waiting. Returns True when anything moved."""
        moved = False
        while self._submitted:
            sends, peer, tag, schedule, handle = self._submitted.popleft()
            running = Running(schedule, self._transport, self._first_tag + tag)
            self._lines.setdefault((sends, peer, tag), deque()).append((running, handle))
        for key, line in list(self._lines.items()):
            while line and self._advance(*line[0]):
                moved = True
                if line[0][0].finished:
                    line.popleft()
            if not line:
                del self._lines[key]
        return moved

    def _advance(self, running: Running, handle: Handle) -> bool:
        try:
            moved = running.advance()
        except PeerLostError:
            raise
        except Exception as error:  # noqa: BLE001  (belongs to whoever waits for it)
            running.close()
            handle.fail_from(error)
            return True
        if running.finished:
            handle.succeed(running.result)
        return moved

    def abandon(self, error: HorovodInternalError | None = None) -> None:
        """Fail everything that is under way."""
        entries = [entry for line in self._lines.values() for entry in line]
        for running, _ in entries:
            running.close()
        handles = [handle for _, handle in entries] + [entry[-1] for entry in self._submitted]
        self._lines.clear()
        self._submitted.clear()
        for handle in handles:
            handle.fail(
                error or ShutDownError(f"{handle.name} was still under way at shutdown(): receive all that is sent")
            )


def _sending(values: Array, envelope: Envelope, peer: int) -> Schedule:
    header = yield Send(envelope.packed(), peer)
    body = yield Send(values, peer)
    yield Wait((header, body))


def _receiving(values: Array, expected: Envelope, peer: int, what: str) -> Schedule:
    header = np.empty(_HEADER_BYTES, np.uint8)
    yield Wait(((yield Recv(header, peer)),))
    sent = Envelope.unpacked(header)
    fits = sent[:2] == expected[:2]
    if not fits:
        values = np.empty(math.prod(sent.shape) * item_bytes(sent.type_name), np.uint8)
    yield Wait(((yield Recv(values, peer)),))  # whatever it is: the next message is behind it
    if not fits:
        raise DisagreementError(
            f"{what}: expected {expected.type_name} {list(expected.shape)}, but {sent.type_name} "
            f"{list(sent.shape)} was sent"
        )
    return sent
