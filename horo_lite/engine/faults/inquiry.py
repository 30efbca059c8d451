"""One question to all ranks: where are you with this operation? And the report that is made of the answers."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

_TITLES = {"planned": "{}:", "barrier": "barrier()", "join": "join()"}  # the others name their tensor
_SHOWN = 4  # ranks whose stacks are printed; the others are counted


class Subject(NamedTuple):
    """The operation in question.

    Attributes:
        ranks: the process set.
        lane: which of its lanes.
    """

    ranks: tuple[int, ...]
    lane: str
    name: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one rank says.

    Attributes:
        asked: it has submitted the operation (or has joined), so that it is not who the others wait for.
        waits: a caller waits there for the operation, so that this rank, too, will report it.
        ended: "finished" or "called shutdown()"; "" while it goes on.
        busy: it is inside ``long_work()``.
        pending: the operations that it has submitted itself.
        stacks: what its threads do; empty where it has submitted the operation.
    """

    asked: bool
    waits: bool = False
    ended: str = ""
    busy: bool = False
    pending: tuple[str, ...] = ()
    stacks: str = ""


class Inquiry:
    """The answers to one question as they come in.

    Args:
        deadline: when ranks that have not answered count as not answering.
    """

    def __init__(self, subject: Subject, own_rank: int, deadline: float) -> None:
        self.subject = subject
        self.deadline = deadline
        self._own_rank = own_rank
        self.answers: dict[int, Answer] = {own_rank: Answer(asked=True, waits=True)}

    @property
    def complete(self) -> bool:
        """All have answered."""
        return len(self.answers) == len(self.subject.ranks)

    @property
    def silent(self) -> list[int]:
        """Ranks that have not answered."""
        return [rank for rank in self.subject.ranks if rank not in self.answers]

    @property
    def missing(self) -> list[int]:
        """Ranks that answered and have not submitted the operation."""
        return [rank for rank in self.subject.ranks if rank in self.answers and not self.answers[rank].asked]

    @property
    def ended(self) -> list[int]:
        """Missing ranks that will never come."""
        return [rank for rank in self.missing if self.answers[rank].ended]

    @property
    def busy(self) -> bool:
        """Some missing rank has said that it will take long."""
        return any(self.answers[rank].busy for rank in self.missing)

    @property
    def is_reporter(self) -> bool:
        """One rank reports for all that wait: the first of them."""
        return self._own_rank == min(rank for rank, answer in self.answers.items() if answer.asked and answer.waits)

    def report(self, kind: str, waited_s: float) -> str:
        """What is known, as text of several lines."""
        what = _TITLES.get(kind, f"{kind} of tensor {{!r}}").format(self.subject.name)
        lines = [f"{what} has waited for {waited_s:.0f} s: {self._cause()}"]
        if self.ended:
            lines.append(
                f"{named(self.ended)} will not take part any more. Where ranks have different numbers of batches, let "
                "each call join() after its last one, or give all the same number of steps."
            )
        for rank in [rank for rank in self.missing if not self.answers[rank].ended][:_SHOWN]:
            answer = self.answers[rank]
            waits = f" waits for {', '.join(map(repr, answer.pending))} and" if answer.pending else ""
            lines.append(f"rank {rank}{waits} is at (innermost call last):")
            lines.append(textwrap.indent(answer.stacks.rstrip("\n"), "  "))
        for rank in self.silent[:_SHOWN]:
            lines.append(
                f"rank {rank} is silent: it is stopped, cut off, or in code that keeps Python out; where it "
                "can, it prints its stacks itself"
            )
        return "\n".join(lines)

    def _cause(self) -> str:
        by_state: dict[str, list[int]] = {}
        for rank in self.missing:
            by_state.setdefault(self.answers[rank].ended or "not submitted it", []).append(rank)
        if self.silent:
            by_state["not answered"] = self.silent
        if not by_state:
            return "all ranks have submitted it, but messages do not arrive (a network that is cut?)"
        return "; ".join(
            f"{named(ranks)} {'has' if len(ranks) == 1 else 'have'} {state}" for state, ranks in by_state.items()
        )


def named(ranks: Sequence[int]) -> str:
    """``ranks 1, 2``; of many the first ones."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
