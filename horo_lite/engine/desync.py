"""Ranks that are out of step in the planned lane: how they are found, and how all hear of it.

Every message of an operation says by its tag where its sender is. So a rank that waits looks, now and then, at what
has come from those it waits for: another tag is another place, and it finds the same there. Two tags of no place carry
the rest. A *call* tells a rank that keeps others waiting where they are, as it may have joined and have nothing else
to follow; an *alarm* tells all ranks that two are out of step, since a third one that waits would never find out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from horo_lite.engine.places import Place, Plan, Tagging
from horo_lite.interfaces import Array, Message, Token, Transport
from horo_lite.transport.driver import Running

_CHECK_AFTER_S = 0.05  # of waiting: looking costs a poll, and being out of step is rare


class DesyncCheck:
    """One planned lane's view of where the other ranks are.

    Args:
        ranks: the global rank of each member, for messages.
        plans: by what messages call them.
    """

    def __init__(
        self, transport: Transport, ranks: tuple[int, ...], tagging: Tagging, plans: Mapping[int, Plan]
    ) -> None:
        self._transport = transport
        self._ranks = ranks
        self._tagging = tagging
        self._plans = plans
        self._begun = 0
        self._waiting_since = 0.0
        self._next_call_s = _CHECK_AFTER_S
        self._leaving: list[Token] = []  # calls and alarms, some of which nobody reads

    def begin(self) -> None:
        """An operation begins; all members begin the same ones."""
        self._begun += 1
        self._waiting_since = 0.0
        self._next_call_s = _CHECK_AFTER_S

    def moved(self) -> None:
        """It gets on: nobody waits yet."""
        self._waiting_since = 0.0

    def look(self, running: Running, place: Place) -> str | None:
        """Called at every poll while an operation waits. Returns who is out of step; None if nobody is known to be."""
        now = time.monotonic()
        if not self._waiting_since:
            self._waiting_since = now
        if now - self._waiting_since < _CHECK_AFTER_S:
            return None
        self._waiting_since = now
        text = self._read_alarm()
        if text is not None:
            return text
        self._read_calls()  # this rank is where others wait for it: they are answered by its messages
        tag = self._tagging.tag(place)
        message = self._transport.probe()
        known = (tag, self._tagging.call, self._tagging.alarm)  # the last two may have arrived just now
        if message is None or message.tag in known or message.peer not in running.awaited:
            self._call(running, tag)
            return None
        text = (
            f"ranks are out of step: rank {self._ranks[self._transport.rank]} is at {self.describe(tag)}, "
            f"rank {self._ranks[message.peer]} at {self.describe(message.tag)}. Every rank must make the same "
            "optimizer steps in the same order; after this error gradients can't be exchanged until "
            "shutdown() and init()"
        )
        self.raise_alarm(text)
        return text

    def awaited_tag(self) -> int | None:
        """The tag of the operation in which others wait for this rank, between two of its own; None for none."""
        tag = self._read_calls()
        if tag is not None:
            return tag
        message = self._transport.probe()
        return None if message is None or message.tag == self._tagging.call else message.tag

    def describe(self, tag: int) -> str:
        """A place, for people."""
        place = self._tagging.place(tag)
        if place.plan == 0:
            return "the making of a new plan (its parameters changed, or an optimizer was wrapped)"
        plan = self._plans.get(place.plan)
        label = f"plan {place.plan}" if plan is None else plan.label
        return f"{label}, step {place.step}, bucket {place.bucket}"

    def raise_alarm(self, text: str) -> None:
        """Tell everyone."""
        message = np.frombuffer(text.encode(), np.uint8)
        for peer in range(self._transport.size):
            if peer != self._transport.rank:
                self._leaving.append(self._transport.send(message, peer, self._tagging.alarm, whole=True))

    def _read_alarm(self) -> str | None:
        message = self._transport.probe(self._tagging.alarm)
        if message is None:
            return None
        buffer = np.empty(message.size_bytes, np.uint8)
        self._receive(message, buffer)
        return buffer.tobytes().decode()

    def _call(self, running: Running, tag: int) -> None:
        """Tell who keeps this rank waiting where it is.

        Needed where a rank's part begins with a message of its own: the root of a broadcast, the odd rank of Adasum.
        """
        call = np.array([self._begun, tag], np.int64)
        for peer in running.awaited:
            self._leaving.append(self._transport.send(call, peer, self._tagging.call, whole=True))
        self._waiting_since += self._next_call_s  # rarely, if it takes long
        self._next_call_s = min(2 * self._next_call_s, 1.0)

    def _read_calls(self) -> int | None:
        """The tag of the operation that others wait for this rank to begin; None when there is none."""
        found = None
        call = np.empty(2, np.int64)
        while (message := self._transport.probe(self._tagging.call)) is not None:
            self._receive(message, call)
            if call[0] == self._begun + 1:  # else it is of an operation that is over
                found = int(call[1])
        return found

    def _receive(self, message: Message, buffer: Array) -> None:
        token = self._transport.recv(buffer, message.peer, message.tag, whole=True)
        while not self._transport.done((token,)):  # it has arrived
            pass
