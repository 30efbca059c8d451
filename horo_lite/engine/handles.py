"""The handle of an operation under way: what asynchronous calls return."""

from __future__ import annotations

from typing import Any, NamedTuple

from horo_lite.errors import HoroLiteError, HorovodInternalError

JOIN_NAME = "horo_lite.join"


class Pending(NamedTuple):
    """An operation that is submitted and not finished, as the stall watch sees it.

    Attributes:
        name: the same on all ranks.
        since: when (``time.monotonic``) a caller began to wait for it; 0.0 while nobody does.
        running: all ranks have submitted it, and its messages are under way.
        first: nothing has been finished on its lane yet.
    """

    name: str
    kind: str
    since: float
    running: bool
    first: bool


class Handle:
    """Becomes finished with a result or with an error; ``Engine.wait`` drives it there.

    Attributes:
        name: the operation's name, for messages.
        finished: the result or the error is there.
        waiting: when (``time.monotonic``) a caller began to wait for it; 0.0 while nobody does.
    """

    __slots__ = ("_error", "_result", "finished", "name", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.finished = False
        self.waiting = 0.0
        self._result: Any = None
        self._error: BaseException | None = None

    def succeed(self, result: Any) -> None:
        """Called once by the engine with what the operation gives."""
        self._result = result
        self.finished = True

    def fail(self, error: BaseException) -> None:
        """Called once by the engine with why there is no result."""
        self._error = error
        self.finished = True

    def fail_from(self, error: Exception) -> None:
        """Fail by an exception from inside the operation (a user's compressor, no memory), as an error of ours."""
        if not isinstance(error, HoroLiteError):
            fault = HorovodInternalError(f"tensor {self.name!r} failed on this rank: {type(error).__name__}: {error}")
            fault.__cause__ = error
            error = fault
        self.fail(error)

    @property
    def error(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:
        """The result of a finished operation.

        Raises:
            HorovodInternalError: the operation failed, on this rank or on another.
        """
        if self._error is not None:
            raise self._error
        return self._result
