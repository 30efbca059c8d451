"""What the ranks of a process set have between them: a transport, a layout, shared memory, a choice of algorithms.

Operations ask it for schedules; it picks the algorithm, the same on every rank, from the size of the message. What it
picks by, the selection table and the staging memory, comes into being with the first operation that needs it, and that
is over on one rank before it is on another. So whatever would choose before has its turn after that operation, on every
rank, and chooses then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from horo_lite.arrays import ArrayKernel, item_bytes, kernel
from horo_lite.collectives.partition import chunks, offsets_of
from horo_lite.collectives.registry import algorithm
from horo_lite.collectives.selection import AUTO, Table
from horo_lite.config import Config
from horo_lite.engine.control import TRAVELLING_BYTES
from horo_lite.engine.instruments import Instruments
from horo_lite.engine.sharing import shared_blocks
from horo_lite.engine.tuning import find_table
from horo_lite.interfaces import Array, Group, Reduction, Schedule, Transport
from horo_lite.transport.topology import Topology
from horo_lite.transport.waiting import is_crowded

if TYPE_CHECKING:
    from horo_lite.engine.coordinator import Agreement
    from horo_lite.engine.operations.base import Operation

_STAGING_BYTES = 3 << 20  # pieces of 1 MiB or a little more, so that what one rank writes another finds in a cache
_LAID_OUT_BYTES = 4 << 20
_LAID_OUT_SMALL_BYTES = 1 << 20  # where there is no room for that, as in a container with 64 MB
_COORDINATED_BYTES = 128 << 10  # of values that go along with requests, from all ranks together
_COORDINATED_FAR_BYTES = 64 << 10
_TRAVELLING_FAR_BYTES = 8 << 10  # across nodes the coordinator's port is what is waited for
_UNMEASURED_BYTES = 8 << 10  # up to here the built-in estimates are as good as a measurement
Choice = tuple[Callable[..., Schedule], ArrayKernel, bool]
"""What makes a schedule, with which kernel, and whether it needs the staging memory."""


class Fabric:
    """One process set's means, for one of its lanes: each lane has an order of its own.

    Args:
        transport: the lane's message space.
        ranks: the global rank of each member.
        topology: where the members are.
        staged: ordinary tensors go through staging memory where that is faster.

    Attributes:
        stages: they do, since all members are on one node and share memory.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: tuple[int, ...],
        topology: Topology,
        config: Config,
        instruments: Instruments,
        staged: bool = True,
    ) -> None:
        self.transport = transport
        self.ranks = ranks
        self.topology = topology
        self.instruments = instruments
        self.stats = instruments.stats
        self.group = Group.whole(transport.rank, transport.size)
        self.size = transport.size
        self._config = config
        self.stages = staged and len(topology.nodes) == 1 and self.shares_memory
        self._staging: list[Array] | None = None
        self.laid_out_areas: list[list[Array]] = []
        """Once there is staging memory: for each of two turns, all members' memory for values that are laid out."""
        self.travelling_bytes = -1
        """Tensors up to this size travel with the request (see ``short_way``)."""
        if config.algorithm == AUTO and len(topology.nodes) == 1:
            self.travelling_bytes = min(TRAVELLING_BYTES, _COORDINATED_BYTES // self.size)
        elif config.algorithm == AUTO:
            self.travelling_bytes = min(_TRAVELLING_FAR_BYTES, _COORDINATED_FAR_BYTES // self.size)
        self.laid_out_bytes = -1
        """Larger ones, up to this size, are laid out in shared memory before the request (see ``short_way``)."""
        if config.algorithm == AUTO and self.stages and not is_crowded(self.size):
            self.laid_out_bytes = _LAID_OUT_BYTES
        self._ranks_per_node = min(len(node) for node in topology.nodes)
        crowded = is_crowded(topology.local_size)
        measures = self.size > 1 and config.algorithm == AUTO and (len(topology.nodes) > 1 or not crowded)
        self.table: Table | None = None if measures else Table()
        self._choice = functools.lru_cache(maxsize=1024)(self._choose)

    def allreduce(
        self,
        buffer: Array,
        type_name: str,
        reduction: int,
        prescale: float = 1.0,
        postscale: float = 1.0,
        device: str = "cpu",
        staged: bool = True,
    ) -> tuple[Schedule, bool]:
        """All-reduce in place. Returns the schedule, and whether it needs the staging memory to itself.

        Args:
            staged: False keeps away from the staging memory (for a schedule inside another one).
        """
        staged = staged and isinstance(buffer, np.ndarray)
        lacking = self._lacking(buffer.nbytes, staged)
        if lacking is not None:
            again = functools.partial(
                self.allreduce, buffer, type_name, reduction, prescale, postscale, device, staged
            )
            return self._after(lacking, lambda: again()[0]), True
        schedule, arithmetic, exclusive = self._choice(
            buffer.nbytes, type_name, reduction, prescale, postscale, device, staged
        )
        if prescale != 1.0:
            return self._prescaled(buffer, arithmetic, schedule), exclusive
        return schedule(self.group, buffer, arithmetic), exclusive

    def start(self, operation: Operation, agreement: Agreement) -> tuple[Schedule, bool]:
        """An operation's schedule, and whether it must wait for those before it that must: called in the same order on
        every member.

        Across nodes every algorithm is chosen by the table, and a compressor's requests may be of any size.
        """
        chooses = len(self.topology.nodes) > 1 or operation.signature.compression is not None
        if self.table is None and chooses and operation.chooses:
            return self._after(self._find_table, lambda: operation.schedule(agreement.signatures, self)[0]), True
        return operation.schedule(agreement.signatures, self)

    def _lacking(self, nbytes: int, staged: bool) -> Callable[[], Schedule] | None:
        """The schedule that finds out what the algorithm for an all-reduce depends on, if no operation has yet."""
        if nbytes <= self.travelling_bytes:
            return None
        if staged and nbytes <= self.laid_out_bytes:
            return self._make_staging if self._staging is None else None
        return self._find_table if self.table is None and nbytes > _UNMEASURED_BYTES else None

    def _after(self, lacking: Callable[[], Schedule], schedule: Callable[[], Schedule]) -> Schedule:
        """Both, in their turn: an operation before this one may have seen to what was lacking."""
        yield from lacking()
        yield from schedule()

    def _find_table(self) -> Schedule:
        if self.table is None:
            self.table = yield from find_table(self, self._config.cache_folder)

    def _prescaled(self, buffer: Array, arithmetic: ArrayKernel, schedule: Callable[..., Schedule]) -> Schedule:
        arithmetic.prescale(buffer)  # when the schedule runs: one that is made may never run
        yield from schedule(self.group, buffer, arithmetic)

    def _choose(
        self, nbytes: int, type_name: str, reduction: int, prescale: float, postscale: float, device: str, staged: bool
    ) -> Choice:
        """The algorithm for all-reduces like this one, made once."""
        arithmetic = kernel(type_name, Reduction(reduction), self.size, prescale, postscale, device)
        if reduction == Reduction.ADASUM:
            return algorithm("adasum", "halving_doubling").schedule, arithmetic, False
        name = self._settled(nbytes, staged)
        if name is None:
            name = self._algorithm("allreduce", nbytes, arithmetic.wide, staged)
        return self._prepared(name, item_bytes(type_name), Reduction(reduction)), arithmetic, name == "shared"

    @property
    def settled_bytes(self) -> int:
        """Up to here an ordinary tensor needs no choice of an algorithm."""
        return max(self.travelling_bytes, self.laid_out_bytes)

    def _settled(self, nbytes: int, staged: bool) -> str | None:
        """For sizes that may also go the short way: what adds up in the same order, so that it shows in no bit."""
        if nbytes <= self.travelling_bytes:
            return "gathered"
        return "shared" if staged and nbytes <= self.laid_out_bytes else None

    def run(self, name: str, buffer: Array, arithmetic: ArrayKernel) -> Schedule:
        """A sum by this algorithm, whatever the table says."""
        return self._prepared(name, buffer.itemsize, Reduction.SUM)(self.group, buffer, arithmetic)

    def _prepared(self, name: str, item_bytes: int, reduction: Reduction) -> Callable[..., Schedule]:
        """An all-reduce with everything but the group, the buffer and the kernel filled in."""
        if name == "shared":
            return self._shared_allreduce
        chosen = algorithm("allreduce", name)
        context = {k: v for k, v in self._context(item_bytes, reduction).items() if k in chosen.takes}
        return functools.partial(chosen.schedule, **context)

    def _algorithm(self, operation: str, nbytes: int, wide: bool = False, staged: bool = False) -> str:
        table = self.table or Table()
        return table.choose(
            operation, nbytes, ranks=self.size, ranks_per_node=self._ranks_per_node, wide=wide,
            context=self.offered(staged), override=self._config.algorithm if operation == "allreduce" else AUTO,
        )

    def offered(self, staged: bool) -> frozenset[str]:
        """What algorithms may need and have here."""
        shared = {"staging"} if staged and self.stages else set()
        return frozenset({"nodes", "segment_elements", "reduction"} | shared)

    def _shared_allreduce(self, group: Group, buffer: Array, arithmetic: ArrayKernel) -> Schedule:
        """Through the staging areas, which the first such all-reduce makes; by messages where memory is not shared."""
        yield from self._make_staging()
        if self._staging:
            areas = [area.view(buffer.dtype) for area in self._staging]
            self.stats.shared_bytes += self.shared_bytes(buffer)
            yield from algorithm("allreduce", "shared")(group, buffer, arithmetic, staging=areas)
        else:
            name = "pairwise" if arithmetic.wide else "ring"
            yield from algorithm("allreduce", name)(
                group, buffer, arithmetic, segment_elements=self._segment_elements(buffer.itemsize)
            )

    def _make_staging(self) -> Schedule:
        """The staging areas and, behind each, two for values that are laid out; none where memory is not shared."""
        if self._staging is not None:
            return
        wanted = (_LAID_OUT_BYTES, _LAID_OUT_SMALL_BYTES) if self.laid_out_bytes > 0 else (0,)
        staging, laid_out = [], -1
        for laid_out_bytes in wanted:
            blocks = yield from shared_blocks(_STAGING_BYTES + 2 * laid_out_bytes, self)
            if not blocks:
                continue
            staging = [block.array("uint8", 0, _STAGING_BYTES) for block in blocks]
            if laid_out_bytes:
                starts = (_STAGING_BYTES, _STAGING_BYTES + laid_out_bytes)
                laid_out = laid_out_bytes
                self.laid_out_areas = [
                    [block.array("uint8", start, laid_out_bytes) for block in blocks] for start in starts
                ]
            break
        self._staging, self.laid_out_bytes = staging, laid_out  # only now: what starts meanwhile must not go by less

    def adasum(
        self,
        buffer: Array,
        type_name: str,
        boundaries: Sequence[int],
        prescale: float = 1.0,
        postscale: float = 1.0,
        device: str = "cpu",
    ) -> Schedule:
        """Adasum in place of several tensors, which begin (and end) at ``boundaries``."""
        arithmetic = kernel(type_name, Reduction.ADASUM, self.size, prescale, postscale, device)
        if prescale != 1.0:
            arithmetic.prescale(buffer)
        return algorithm("adasum", "halving_doubling")(self.group, buffer, arithmetic, boundaries=boundaries)

    def bucket_reducer(
        self,
        mine: Array,
        peers: Sequence[Array] | None,
        type_name: str,
        reduction: Reduction,
        prescale: float = 1.0,
        postscale: float = 1.0,
        device: str = "cpu",
    ) -> Callable[[], Schedule]:
        """What makes the schedule of a bucket's all-reduce in place, step by step; everything else is done now.

        Args:
            mine: the bucket.
            peers: the buckets of the ranks of this node, which have mapped them; None where they have not.
        """
        arithmetic = kernel(type_name, reduction, self.size, prescale, postscale, device)
        several_nodes = len(self.topology.nodes) > 1
        if peers is None or (several_nodes and arithmetic.wide):
            return lambda: self.allreduce(
                mine, type_name, reduction, prescale, postscale, device, staged=False
            )[0]
        chosen = algorithm("resident_allreduce", "hierarchical" if several_nodes else "flat")
        context = {k: v for k, v in self._context(mine.itemsize).items() if k in chosen.takes}
        shared_bytes = self.shared_bytes(mine)

        def reduce_in_place() -> Schedule:
            if prescale != 1.0:
                arithmetic.prescale(mine)
            self.stats.shared_bytes += shared_bytes
            return chosen.schedule(self.group, mine, peers, arithmetic, **context)

        return reduce_in_place

    def shared_bytes(self, buffer: Array) -> int:
        """A rank reads its slice of the others' memory to reduce, and the others' slices to read back."""
        ranks = self.topology.local_size
        return 2 * (ranks - 1) * int(buffer.nbytes) // ranks

    @property
    def shares_memory(self) -> bool:
        """The ranks of a node may map each other's memory."""
        return self._config.shared_memory and self.size > 1

    def reduce_scatter(
        self,
        buffer: Array,
        counts: Sequence[int],
        type_name: str,
        reduction: int,
        prescale: float = 1.0,
        postscale: float = 1.0,
        device: str = "cpu",
    ) -> Schedule:
        """In place: member i's part (``counts[i]`` elements) becomes the reduction of all."""
        arithmetic = kernel(type_name, Reduction(reduction), self.size, prescale, postscale, device)
        if prescale != 1.0:
            arithmetic.prescale(buffer)
        chosen = algorithm("reduce_scatter", self._algorithm("reduce_scatter", buffer.nbytes, arithmetic.wide))
        return chosen(self.group, buffer, counts, arithmetic, **self._context(buffer.itemsize))

    def allgather(self, own: Array, gathered: Array, counts: Sequence[int]) -> Schedule:
        """All members' arrays, member i's with ``counts[i]`` elements, one after the other into ``gathered``."""
        start = sum(counts[: self.group.index])
        gathered[start : start + len(own)] = own
        name = self._algorithm("allgather", gathered.nbytes)
        return algorithm("allgather", name)(self.group, gathered, counts, **self._context(gathered.itemsize))

    def broadcast(self, buffer: Array, root: int) -> Schedule:
        """Member ``root``'s buffer into everyone's."""
        name = self._algorithm("broadcast", buffer.nbytes)
        return algorithm("broadcast", name)(self.group, buffer, root, **self._context(buffer.itemsize))

    def alltoall(
        self, outgoing: Array, sent: Sequence[int], incoming: Array, received: Sequence[int]
    ) -> Schedule:
        """``sent[i]`` elements go to member i, ``received[i]`` come from it."""
        parts = chunks(outgoing, offsets_of(sent)), chunks(incoming, offsets_of(received))
        return algorithm("alltoall", "pairwise")(self.group, *parts)

    def _context(self, item_bytes: int, reduction: Reduction = Reduction.SUM) -> dict[str, object]:
        return {
            "segment_elements": self._segment_elements(item_bytes),
            "nodes": self.topology.nodes,
            "reduction": reduction,
        }

    def _segment_elements(self, item_bytes: int) -> int:
        return max(1, self._config.segment_bytes // item_bytes)
