"""The small messages between the members of a process set and its coordinator."""

from __future__ import annotations

import pickle
from collections import deque
from typing import Any, cast

import cloudpickle
import numpy as np

from horo_lite.interfaces import Array, Token, Transport

_CONTROL_TAG = 0


def packed(content: Any) -> bytes:
    """Pickled; by value what has no importable name (a compressor class inside a function), which takes longer."""
    try:
        return pickle.dumps(content)
    except (AttributeError, TypeError, pickle.PicklingError):
        return cast("bytes", cloudpickle.dumps(content))


class ControlChannel:
    """Messages of any length on a tag of their own; nothing here waits."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._arriving: deque[tuple[Token, Array, int]] = deque()
        self._leaving: deque[Token] = deque()

    def send(self, message: bytes, member: int) -> None:
        """Send a message; messages to one member arrive in order."""
        token = self._transport.send(np.frombuffer(message, np.uint8), member, _CONTROL_TAG, whole=True)
        if not self._transport.done((token,)):
            self._leaving.append(token)

    @property
    def sending(self) -> bool:
        """A message, too long to be sent at once, is still leaving: it goes on only while somebody polls."""
        return bool(self._leaving)

    def flush(self) -> bool:
        """Let such messages go on. True when one has left."""
        moved = False
        while self._leaving and self._transport.done((self._leaving[0],)):
            self._leaving.popleft()
            moved = True
        return moved

    def receive(self) -> tuple[bytes, int] | None:
        """The next message that has arrived, and its sender; None when there is none."""
        arriving = self._arriving
        message = self._transport.probe(_CONTROL_TAG)
        if message is not None:
            buffer = np.empty(message.size_bytes, np.uint8)
            token = self._transport.recv(buffer, message.peer, _CONTROL_TAG, whole=True)
            arriving.append((token, buffer, message.peer))
        if not arriving or not self._transport.done(arriving[0][:1]):
            return None
        _, buffer, peer = arriving.popleft()
        return buffer.tobytes(), peer
