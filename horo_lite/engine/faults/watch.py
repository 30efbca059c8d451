"""The service thread: notices that an operation waits too long, finds out why, and says so.

It sleeps most of the time. It answers other ranks even when the main thread is stuck or has ended, so an operation
that waits in vain is reported with what the missing ranks are doing. A rank that has ended stays until all have
(``farewell``): ``MPI_Finalize`` would block, and then nobody could say that it had ended.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from horo_lite.config import Config
from horo_lite.engine.engine import Engine
from horo_lite.engine.faults import stacks
from horo_lite.engine.faults.channel import Channel, Note
from horo_lite.engine.faults.ending import Ending
from horo_lite.engine.faults.inquiry import Answer, Inquiry, Subject, named
from horo_lite.engine.faults.neighbour import Neighbour, processes_within_reach
from horo_lite.engine.faults.parent import Parent, die_with_launcher
from horo_lite.engine.handles import JOIN_NAME, Pending
from horo_lite.errors import OWN_FAULT
from horo_lite.log import logger
from horo_lite.transport.mpi_world import MPIWorld
from horo_lite.transport.topology import Topology

_TICK_S = 0.25
_ENDING_TICK_S = 2e-3
_ANSWER_S = 2.0
_DEFER_S = 5.0  # how long the first waiting rank is left to end the job for all
_NO_LANE = ""  # of a question about what a rank does, not about an operation
_LATE_ASKED = 4  # ranks
_VANISHED_S = 1.0  # an orderly end is known here so soon after the first rank has made it


class WatchedLane(Protocol):
    """A lane as far as the watch sees it; read from its thread while others use it."""

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def joined(self) -> bool: ...

    def pending(self) -> list[Pending]: ...


@dataclasses.dataclass
class Stall:
    """An operation that a caller waits for, from the moment it was first seen."""

    lane: WatchedLane
    pending: Pending
    since: float
    warned: bool = False
    deferred: bool = False
    inquiry: Inquiry | None = None
    final: bool = False


class Watch:
    """Starts at once; one per ``init()``.

    Args:
        lanes: what is watched now.
        moves: a number that changes whenever any operation of this process gets on.
        channel: None where MPI does not let several threads in: then ranks know of themselves only.
        processes: of the ranks of this node, by rank.
    """

    def __init__(
        self,
        lanes: Callable[[], Sequence[WatchedLane]],
        moves: Callable[[], int],
        channel: Channel | None,
        ending: Ending,
        config: Config,
        size: int,
        processes: Mapping[int, int],
    ) -> None:
        self.busy = 0
        self._lanes = lanes
        self._moves = moves
        self._channel = channel
        self._ending = ending
        self._rank = ending.rank
        self._size = size
        self._processes = processes
        self._parent = Parent()
        self._neighbour = Neighbour(self._rank, processes)
        self._stalls: dict[tuple[int, str, float], Stall] = {}
        self._last_moves = 0
        self._looks = True
        self._ended = ""
        self._farewells: dict[int, float] = {}
        self._late_said = False
        self._wake = threading.Event()
        self._over = threading.Event()
        self._warn_s, self._abort_s = config.stall_warn_s, config.stall_abort_s
        self._first_warn_s, self._first_abort_s = config.first_stall_limits_s
        self._answering: dict[str, Callable[[int, Note], None]] = {
            "question": self._on_question, "answer": self._on_answer, "dump": self._on_dump,
            "failed": self._on_failed, "farewell": self._on_farewell, "over": self._on_over,
        }
        stacks.allow_dumps()
        ending.announce = self._announce_failure
        self._thread = threading.Thread(target=self._serve, name=f"{stacks.OWN_THREADS}watch", daemon=True)
        self._thread.start()

    def farewell(self, ended: str) -> None:
        """This rank has ended: stay and answer until all have. Collective.

        Args:
            ended: how, for the reports of others.
        """
        if ended == "finished":
            self._ending.leave_failed()
        self._ended = ended
        if self._channel is not None:
            self._channel.send(0, {"is": "farewell"})
        else:
            self._over.set()
        self._wake.set()
        self._over.wait()
        self._thread.join()
        self._neighbour.close()
        self._ending.announce = lambda: None
        self._ending.awaited = False
        if self._channel is not None:
            self._channel.close()

    # --- the thread ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._over.is_set() or (self._channel is not None and self._channel.sending):
                self._tick(time.monotonic())
                if not self._ended:
                    self._wake.wait(_TICK_S)
                elif not self._over.is_set():
                    time.sleep(_ENDING_TICK_S)
        except Exception:  # noqa: BLE001  (training goes on without it)
            logger.exception("the stall watch has failed; this rank no longer answers the others. %s", OWN_FAULT)
        finally:
            self._over.set()

    def _tick(self, now: float) -> None:
        if self._parent.gone:
            self._ending.leave_orphaned()
        if self._channel is not None:
            for peer, note in self._channel.receive():
                self._answering[note["is"]](peer, note)
        self._look_for_neighbour(now)
        self._look_for_late_ranks(now)
        if self._ended or not self._looks:
            return
        try:
            self._look_for_stalls(now)
        except Exception:  # noqa: BLE001  (training goes on; the others still want answers, and a farewell)
            self._looks = False
            logger.exception(
                "the stall watch has failed; operations that wait in vain are no longer noticed. %s", OWN_FAULT
            )

    def _look_for_neighbour(self, now: float) -> None:
        """In an orderly end all ranks know that it is over before the first one is gone."""
        gone_s = self._neighbour.gone_s(now)
        if self._over.is_set() or gone_s < (_DEFER_S if self._ending.other_failed.is_set() else _VANISHED_S):
            return
        self._ending.fail(
            f"rank {self._neighbour.rank} (process {self._neighbour.pid} of this node) has vanished without a word: "
            "killed (often out of memory: see dmesg, or the limits of the container or batch job) or ended by code "
            "in C. The job ends now.", 1,
        )

    def _look_for_stalls(self, now: float) -> None:
        moves = self._moves()
        moved, self._last_moves = moves != self._last_moves, moves
        seen = {}
        for lane in self._lanes():
            for pending in _pending(lane):
                if not pending.since or self.busy:
                    continue
                key = (id(lane), pending.name, pending.since)
                stall = self._stalls.get(key) or Stall(lane, pending, now)
                if pending.running and moved:
                    stall.since = now
                seen[key] = stall
                self._judge(stall, now)
        self._stalls = seen

    def _judge(self, stall: Stall, now: float) -> None:
        waited_s = now - stall.since
        first = stall.pending.first
        warn_s = self._first_warn_s if first else self._warn_s
        abort_s = self._first_abort_s if first else self._abort_s
        if stall.inquiry is not None:
            if stall.inquiry.complete or now >= stall.inquiry.deadline:
                self._conclude(stall, stall.inquiry, waited_s, now)
        elif abort_s and waited_s >= abort_s and stall.pending.name != JOIN_NAME:
            self._inquire(stall, now, final=True)
        elif warn_s and waited_s >= warn_s and not stall.warned:
            self._inquire(stall, now, final=False)

    # --- asking --------------------------------------------------------------------------------------------------

    def _inquire(self, stall: Stall, now: float, final: bool) -> None:
        subject = Subject(stall.lane.ranks, type(stall.lane).__name__, stall.pending.name)
        stall.inquiry = Inquiry(subject, self._rank, now + (_ANSWER_S if self._channel is not None else 0.0))
        stall.final = final
        for rank in subject.ranks:
            if rank != self._rank and self._channel is not None:
                self._channel.send(rank, {"is": "question", **subject._asdict()})

    def _conclude(self, stall: Stall, inquiry: Inquiry, waited_s: float, now: float) -> None:
        stall.inquiry = None
        fatal = stall.final or bool(inquiry.ended)
        if inquiry.busy or (stall.pending.name == JOIN_NAME and not inquiry.ended):
            stall.since, stall.warned = now, False
            return
        stall.warned = True
        if not inquiry.is_reporter and not (fatal and stall.deferred):
            if fatal:
                stall.deferred, stall.warned = True, False
                stall.since = now - waited_s + _DEFER_S
            return
        for rank in inquiry.silent:
            self._request_dump(rank, inquiry)
        text = inquiry.report(stall.pending.kind, waited_s)
        if self._channel is None:
            text += "\nother ranks can't be asked: MPI was started without MPI_THREAD_MULTIPLE"
        if fatal:
            limit = "" if inquiry.ended else " (HORO_LITE_STALL_ABORT_S is over; 0 is never)"
            self._ending.fail(f"{text}\nThe job ends now{limit}.", 1)
        ends = f"; the job ends after {self._abort_s:g} s (HORO_LITE_STALL_ABORT_S)" if self._abort_s else ""
        logger.warning(
            "%s\nThis is said once, after %g s (HORO_LITE_STALL_WARN_S)%s. For work that takes long: "
            "with hvd.long_work().", text, self._warn_s, ends,
        )

    def _request_dump(self, rank: int, inquiry: Inquiry) -> None:
        if rank in self._processes:
            stacks.request_dump(self._processes[rank])
        elif self._channel is not None:
            for other in inquiry.answers:
                if other != self._rank:
                    self._channel.send(other, {"is": "dump", "rank": rank})

    def _announce_failure(self) -> None:
        """Before this rank ends the job: let the others know that they need not say where they were ended."""
        if self._channel is not None:
            for rank in range(self._size):
                if rank != self._rank:
                    self._channel.send(rank, {"is": "failed"})

    # --- answering -----------------------------------------------------------------------------------------------

    def _send(self, peer: int, note: Note) -> None:
        if self._channel is not None:
            self._channel.send(peer, note)

    def _on_question(self, peer: int, note: Note) -> None:
        subject = Subject(tuple(note["ranks"]), note["lane"], note["name"])
        answer = self._answer(subject)
        self._send(peer, {"is": "answer", "subject": subject, "answer": dataclasses.asdict(answer)})

    def _answer(self, subject: Subject) -> Answer:
        pending = [entry for lane in self._lanes() for entry in _pending(lane) if entry.name != JOIN_NAME]
        for lane in self._lanes():
            if lane.ranks == subject.ranks and type(lane).__name__ == subject.lane and not self._ended:
                mine = [entry for entry in _pending(lane) if entry.name == subject.name]
                if mine or (lane.joined and subject.name != JOIN_NAME):
                    return Answer(asked=True, waits=any(entry.since for entry in mine))
        names = tuple(entry.name for entry in pending[:6])
        return Answer(False, False, self._ended, bool(self.busy), names, "" if self._ended else stacks.python_stacks())

    def _on_answer(self, peer: int, note: Note) -> None:
        ranks, lane, name = note["subject"]
        fields: dict[str, Any] = note["answer"]
        if lane == _NO_LANE and fields["stacks"]:
            logger.info("rank %d is at (innermost call last):\n%s", peer, fields["stacks"].rstrip("\n"))
        for stall in self._stalls.values():
            if stall.inquiry is not None and stall.inquiry.subject == (tuple(ranks), lane, name):
                stall.inquiry.answers[peer] = Answer(**{**fields, "pending": tuple(fields["pending"])})

    def _on_dump(self, peer: int, note: Note) -> None:
        if note["rank"] in self._processes:
            stacks.request_dump(self._processes[note["rank"]])

    def _on_failed(self, peer: int, note: Note) -> None:
        self._ending.other_failed.set()

    # --- the end -------------------------------------------------------------------------------------------------

    def _on_farewell(self, peer: int, note: Note) -> None:
        """On rank 0: remember when."""
        self._farewells[peer] = time.monotonic()
        if len(self._farewells) == self._size:
            for rank in range(self._size):
                self._send(rank, {"is": "over"})

    def _look_for_late_ranks(self, now: float) -> None:
        """On rank 0: those that have ended wait for the others, who may have work of their own, or hang."""
        if self._late_said or not self._farewells or not self._first_warn_s:
            return
        if now - min(self._farewells.values()) < self._first_warn_s:
            return
        late = [rank for rank in range(self._size) if rank not in self._farewells]
        if not late:
            return
        self._late_said = True
        logger.info(
            "%s came to the end %.0f s ago; the job ends once %s there too", named(sorted(self._farewells)),
            now - min(self._farewells.values()), f"{named(late)} {'is' if len(late) == 1 else 'are'}",
        )
        for rank in late[:_LATE_ASKED]:
            self._send(rank, {"is": "question", **Subject((rank,), _NO_LANE, "the end")._asdict()})

    def _on_over(self, peer: int, note: Note) -> None:
        self._over.set()


def _pending(lane: WatchedLane) -> list[Pending]:
    try:
        return lane.pending()
    except RuntimeError:  # it has changed while it was copied; the next look will do
        return []


def make_watch(engine: Engine, world: MPIWorld, ending: Ending, config: Config, topology: Topology) -> Watch:
    """Collective: the watch over one engine of one MPI world."""
    die_with_launcher()
    channel = Channel(world.transport()) if world.threads_multiple else None
    return Watch(
        lambda: engine.lanes, lambda: engine.moves, channel, ending, config, world.size,
        processes_within_reach(world.rank, topology.local_ranks, world.allgather),
    )
