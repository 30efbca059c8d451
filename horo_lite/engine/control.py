"""The small messages between the members of a process set and its coordinator.

A message that was agreed on before is a header of fixed length, with or without values behind it; any other one is a
pickle. What is longer than a mailbox holds is announced in it and follows on a tag of its own.
"""

from __future__ import annotations

import itertools
import pickle
import struct
from collections import deque
from typing import Any, cast

import cloudpickle
import numpy as np

from horo_lite.interfaces import Array, Mailbox, Token, Transport
from horo_lite.transport.mailbox import ProbedMailbox

NUMBERED = struct.Struct("<c7xqq")  # a mark, number of the cached agreement, counter; values behind it are aligned
PLAIN, LAID_OUT = b"#", b"="  # the marks: LAID_OUT where the values lie in shared memory (``short_way``)
TRAVELLING_BYTES = 32 << 10  # the most values that go along with a request
FIRST_DATA_TAG = 16  # lower tags are the control channel's own

_MAILBOX_BYTES = NUMBERED.size + TRAVELLING_BYTES
_ANNOUNCED = struct.Struct("<cqq")  # b"!", length, tag
_CONTROL_TAG = 0


def packed(content: Any) -> bytes:
    """Pickled; by value what has no importable name (a compressor class inside a function), which takes longer."""
    try:
        return pickle.dumps(content)
    except (AttributeError, TypeError, pickle.PicklingError):
        return cast("bytes", cloudpickle.dumps(content))


class ControlChannel:
    """Messages of any length, in order; nothing here waits.

    Args:
        prepared: let the transport make what a message needs once (``Transport.mailbox``), for ranks of one node;
            False also for messages so rare that nothing should be kept posted for them.

    Attributes:
        mailbox: where they arrive. Whoever knows what comes next may use it directly while the channel is not ``busy``.
    """

    def __init__(self, transport: Transport, prepared: bool = False) -> None:
        self._transport = transport
        make = transport.mailbox if prepared else lambda *args: ProbedMailbox(transport, *args)
        self.mailbox: Mailbox = make(_CONTROL_TAG, _MAILBOX_BYTES)
        self._arriving: tuple[Token, Array, int] | None = None
        self._leaving: deque[Token] = deque()
        self._long = itertools.count()

    def send(self, message: bytes, member: int) -> None:
        """Send a message; messages to one member arrive in order. A signal handler may send between two lines here."""
        if len(message) > _MAILBOX_BYTES:
            tag = _CONTROL_TAG + 1 + next(self._long) % (FIRST_DATA_TAG - 1)
            self._send(message, member, tag)
            message = _ANNOUNCED.pack(b"!", len(message), tag)
        self._send(message, member, _CONTROL_TAG)

    def _send(self, message: bytes, member: int, tag: int) -> None:
        token = self._transport.send(np.frombuffer(message, np.uint8), member, tag, whole=True)
        if not self._transport.done((token,)):
            self._leaving.append(token)

    @property
    def sending(self) -> bool:
        """A message, too long to be sent at once, is still leaving: it goes on only while somebody polls."""
        return bool(self._leaving) or self.mailbox.posting

    @property
    def busy(self) -> bool:
        """A long message is leaving or arriving."""
        return self._arriving is not None or self.sending

    def flush(self) -> bool:
        """Let such messages go on. True when one has left."""
        moved = self.mailbox.flush()
        while self._leaving and self._transport.done((self._leaving[0],)):
            self._leaving.popleft()
            moved = True
        return moved

    def receive(self) -> tuple[bytes, int] | None:
        """The next message that has arrived, and its sender; None when there is none."""
        if self._arriving is not None:
            return self._arrived()
        received = self.mailbox.receive()
        return None if received is None else self.take(*received)

    def take(self, peer: int, nbytes: int) -> tuple[bytes, int] | None:
        """What the mailbox has received, and its sender; None where it announces a message that is still arriving."""
        message: bytes = self.mailbox.incoming[:nbytes].tobytes()
        if message[:1] != b"!":
            return message, peer
        _, length, tag = _ANNOUNCED.unpack(message)
        buffer = np.empty(length, np.uint8)
        self._arriving = self._transport.recv(buffer, peer, tag, whole=True), buffer, peer
        return self._arrived()

    def _arrived(self) -> tuple[bytes, int] | None:
        if self._arriving is None or not self._transport.done(self._arriving[:1]):
            return None
        _, buffer, peer = self._arriving
        self._arriving = None
        return buffer.tobytes(), peer
