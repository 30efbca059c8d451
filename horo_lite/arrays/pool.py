"""Scratch arrays whose memory is used again.

Large fresh memory is paid for at first touch (the kernel zeroes its pages, which takes as long as
the copy that follows), so a schedule that asks for the same scratch every step should get the same
pages. A buffer returns to the shelf when the last array that looks at it dies; nobody gives it back
by hand, so nobody can give it back too early.
"""

from __future__ import annotations

import collections
import threading
from typing import Any

import numpy as np

_SMALL_BYTES = 8 << 20  # glibc keeps what is smaller (up to 32 MiB) warm by itself, and faster
_ROUND_BYTES = 1 << 16
_SHELF_BUFFERS = 8
_SHELF_BYTES = 256 << 20


class _Lease:
    """Owns memory on loan; base of the arrays handed out, so that slices of slices keep it."""

    def __init__(
        self, memory: np.ndarray[Any, Any], nbytes: int, home: collections.deque[Any]
    ) -> None:
        self._memory = memory
        self._home = home
        address = memory.__array_interface__["data"]
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": address,
        }

    def __del__(self) -> None:
        self._home.append(self._memory)  # atomic, takes no lock: a collection can start anywhere


class Pool:
    """Hands out uninitialised arrays and keeps what comes back, up to a limit; thread-safe.

    Args:
        small_bytes: smaller arrays are left to malloc.
        shelf_bytes: how much memory may lie unused.
    """

    def __init__(self, small_bytes: int = _SMALL_BYTES, shelf_bytes: int = _SHELF_BYTES) -> None:
        self._small_bytes = small_bytes
        self._shelf_bytes = shelf_bytes
        self._returned: collections.deque[np.ndarray[Any, Any]] = collections.deque(
            maxlen=_SHELF_BUFFERS
        )
        self._shelf: list[np.ndarray[Any, Any]] = []  # oldest first
        self._lock = threading.Lock()

    def empty(self, elements: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """A flat array of ``elements`` elements with arbitrary content."""
        nbytes = elements * dtype.itemsize
        if nbytes < self._small_bytes:
            return np.empty(elements, dtype)
        memory = self._take(nbytes)
        if memory is None:
            memory = np.empty(-(-nbytes // _ROUND_BYTES) * _ROUND_BYTES, np.uint8)
        return np.asarray(_Lease(memory, nbytes, self._returned)).view(dtype)

    def clear(self) -> None:
        """Give the shelf's memory back to the system."""
        with self._lock:
            self._returned.clear()
            self._shelf.clear()

    def _take(self, nbytes: int) -> np.ndarray[Any, Any] | None:
        with self._lock:
            while self._returned:
                self._shelf.append(self._returned.popleft())
            best = None
            for index, memory in enumerate(self._shelf):
                # More than twice the need is left for whoever needs it.
                if nbytes <= memory.nbytes <= 2 * nbytes + _ROUND_BYTES and (
                    best is None or memory.nbytes < self._shelf[best].nbytes
                ):
                    best = index
            taken = None if best is None else self._shelf.pop(best)
            held = sum(memory.nbytes for memory in self._shelf)
            while self._shelf and (held > self._shelf_bytes or len(self._shelf) > _SHELF_BUFFERS):
                held -= self._shelf.pop(0).nbytes
            return taken


shared_pool = Pool()
"""The process's own."""
