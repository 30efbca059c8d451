"""Short messages between the service threads of all ranks, on a communicator of their own.

They are JSON, not pickles, and are received by polling, so that a service thread costs next to nothing.
"""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

from horo_lite.engine.control import ControlChannel
from horo_lite.interfaces import Transport

Note = dict[str, Any]


class Channel:
    """A control channel that any thread may use; the lock keeps to one at a time."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._control = ControlChannel(transport)
        self._lock = threading.RLock()  # a signal handler may announce a failure while this thread sends

    def send(self, peer: int, note: Note) -> None:
        """Begin to send a note; it leaves while somebody polls with ``receive``."""
        with self._lock:
            self._control.send(json.dumps(note).encode(), peer)

    def receive(self) -> list[tuple[int, Note]]:
        """The notes that have arrived, with their senders."""
        notes = []
        with self._lock:
            self._control.flush()
            while (received := self._control.receive()) is not None:
                message, peer = received
                with contextlib.suppress(ValueError):  # not of ours: nothing that arrives may stop the service
                    notes.append((peer, json.loads(message)))
        return notes

    @property
    def sending(self) -> bool:
        """Something has not left yet."""
        return self._control.sending

    def close(self) -> None:
        """Collective: give the communicator back."""
        self._transport.close()
