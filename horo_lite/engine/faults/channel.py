"""Short messages between the service threads of all ranks, on a communicator of their own.

They are JSON, not pickles, and are received by polling, so that a service thread costs next to nothing.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np

from horo_lite.interfaces import Array, Token, Transport

Note = dict[str, Any]
_TAG = 0


class Channel:
    """Any thread may use it; the lock keeps to one at a time."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = threading.RLock()  # a signal handler may announce a failure while this thread sends
        self._leaving: list[tuple[Token, Array]] = []
        self._arriving: list[tuple[Token, Array, int]] = []

    def send(self, peer: int, note: Note) -> None:
        """Begin to send a note; it leaves while somebody polls with ``receive``."""
        buffer = np.frombuffer(json.dumps(note).encode(), np.uint8)
        with self._lock:
            self._leaving.append((self._transport.send(buffer, peer, _TAG, whole=True), buffer))

    def receive(self) -> list[tuple[int, Note]]:
        """The notes that have arrived, with their senders."""
        transport = self._transport
        with self._lock:
            while (message := transport.probe(_TAG)) is not None:
                buffer = np.empty(message.size_bytes, np.uint8)
                self._arriving.append((transport.recv(buffer, message.peer, _TAG, whole=True), buffer, message.peer))
            self._leaving = [entry for entry in self._leaving if not transport.done(entry[:1])]
            notes, still = [], []
            for entry in self._arriving:
                if transport.done(entry[:1]):
                    notes.append((entry[2], json.loads(entry[1].tobytes())))
                else:
                    still.append(entry)
            self._arriving = still
        return notes

    @property
    def sent(self) -> bool:
        """Everything has left."""
        return not self._leaving

    def close(self) -> None:
        """Collective: give the communicator back."""
        self._transport.close()
