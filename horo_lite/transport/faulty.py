"""A transport that fails on purpose, for tests: ``HORO_LITE_TEST_FAULT=rank:messages:what``."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from horo_lite.errors import PeerLostError
from horo_lite.interfaces import Array, Mailbox, Token, Transport
from horo_lite.transport.mailbox import ProbedMailbox

_DELAY_S = 3.0
_EXIT_CODE = 9


class FaultyTransport:
    """Passes everything on until this process has sent so many messages on all its transports, then fails.

    Args:
        sent: counts the messages of the process; shared by its transports.
    """

    def __init__(self, transport: Transport, what: str, after: int, sent: itertools.count[int]) -> None:
        self._transport = transport
        self._what = what
        self._after = after
        self._sent = sent
        self._is_cut = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, buffer: Array, peer: int, tag: int, whole: bool = False) -> Token:
        number = next(self._sent)
        if number == self._after:
            _FAULTS.get(self._what, _nothing)()
        self._is_cut = self._is_cut or (self._what == "cut" and number >= self._after)
        if self._is_cut:
            return None  # lost on the way, and the sender does not know
        return self._transport.send(buffer, peer, tag, whole)

    def done(self, tokens: Sequence[Token]) -> bool:
        return self._transport.done([token for token in tokens if token is not None])

    def mailbox(self, tag: int, capacity: int) -> Mailbox:
        return ProbedMailbox(self, tag, capacity)  # whose messages count

    def subgroup(self, ranks: Sequence[int]) -> Transport | None:
        inner = self._transport.subgroup(ranks)
        return None if inner is None else FaultyTransport(inner, self._what, self._after, self._sent)


def _lose() -> None:
    raise PeerLostError("a message failed in the MPI library (injected)")


def _nothing() -> None:
    pass


_FAULTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(_EXIT_CODE),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "lose": _lose,
    "delay": lambda: time.sleep(_DELAY_S),
}
