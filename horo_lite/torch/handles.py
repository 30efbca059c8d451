"""Handles of asynchronous operations, and those whose result is computed from the results of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from horo_lite import functions
from horo_lite.engine import Handle


class Follow:
    """A handle whose result is computed from those of other operations; calling it waits, as in Horovod.

    Args:
        handles: what has to finish first.
        finish: called once with their results.
    """

    def __init__(self, handles: Sequence[Handle], finish: Callable[..., Any]) -> None:
        self._handles = handles
        self._finish: Callable[..., Any] | None = finish
        self._result: Any = None

    def __call__(self) -> Any:
        if self._finish is not None:
            self._result = self._finish(*[functions.synchronize(handle) for handle in self._handles])
            self._finish = None
        return self._result

    def poll(self) -> bool:
        """True when calling this would not wait."""
        return all(functions.poll(handle) for handle in self._handles)


def synchronize(handle: Handle | Follow) -> Any:
    """Wait for an asynchronous operation and return its result.

    Args:
        handle: what an asynchronous form returned.

    Raises:
        HorovodInternalError: it failed, on this rank or on another.
    """
    return handle() if isinstance(handle, Follow) else functions.synchronize(handle)


def poll(handle: Handle | Follow) -> bool:
    """True when ``synchronize(handle)`` would return at once."""
    return handle.poll() if isinstance(handle, Follow) else functions.poll(handle)
