"""The seams of horo_lite on one page: what each stage of the data path may ask of the next.

::

    adapter -> bucket -> compressor -> collective -> transport
                             ^             ^             ^
                             +----------- engine --------+

A *flat array* is one-dimensional and contiguous: a numpy array, or a torch tensor where the data is on a device.
16-bit floats of every framework are numpy arrays of ``float16`` or ``ml_dtypes.bfloat16``; on the wire all is bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

Array: TypeAlias = Any  # a flat array, see above
Token: TypeAlias = Any  # what a transport returns for a send or receive under way


class Reduction(enum.IntEnum):
    """How values of several ranks become one; the numbers are Horovod's ``ReduceOp``."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


class Group(NamedTuple):
    """The ranks that take part in a schedule, in order, and which of them is the caller.

    ``ranks[i]`` is the transport's number of the group's i-th member, so that a schedule for a node, a lane across
    nodes or the whole world is the same code.
    """

    ranks: tuple[int, ...]
    index: int  # type: ignore[assignment]  # hides tuple.index

    @property
    def size(self) -> int:
        return len(self.ranks)

    @classmethod
    def whole(cls, rank: int, size: int) -> Group:
        """All ``size`` ranks of a transport, seen from ``rank``."""
        return cls(tuple(range(size)), rank)


# --- Schedules: collectives yield these instructions; a driver carries them out ----------------------------------


class Send(NamedTuple):
    """Begin to send; the yield returns a token. The buffer must not change until the token was waited for."""

    buffer: Array
    peer: int


class Recv(NamedTuple):
    """Begin to receive exactly ``len(buffer)`` elements; the yield returns a token."""

    buffer: Array
    peer: int


class Wait(NamedTuple):
    """Go on when all these tokens are complete."""

    tokens: Sequence[Token]


class Exchange(NamedTuple):
    """Send one buffer, receive another, go on when both are complete. Empty buffers are messages too (a fence)."""

    outgoing: Array
    dst: int
    incoming: Array
    src: int


class Native(NamedTuple):
    """Let the MPI library do it: ``operation`` is "allreduce" (SUM, MIN, MAX, PRODUCT; in place) or "broadcast"."""

    operation: str
    buffer: Array
    reduction: Reduction
    root: int


Instruction: TypeAlias = Send | Recv | Wait | Exchange | Native
Schedule: TypeAlias = Generator[Instruction, Any, Any]
"""A collective algorithm. Between two instructions it may compute, but never touches MPI, sockets or clocks.
Messages between two ranks within one schedule arrive in the order in which they were sent."""


class Kernel(Protocol):
    """Arithmetic on flat arrays of one type under one reduction, in cache-sized blocks (made by ``arrays``).

    Schedules call it; the simulator wraps it to charge virtual time.
    """

    wide: bool
    """True where partial results must not travel (16-bit floats, integer averages): then ``combine`` is called
    once per chunk, with all ranks' inputs and ``last=True``."""

    def empty(self, elements: int) -> Array:
        """Scratch of the arrays' own type and device, reused from call to call where that is safe."""
        ...

    def copy(self, out: Array, source: Array) -> None:
        """out[:] = source."""
        ...

    def combine(self, out: Array, inputs: Sequence[Array], last: bool = False) -> None:
        """Reduce ``inputs`` in the given order into ``out``, which may be one of them (any, but no partial overlap).

        ``last`` marks the final combination of a chunk: the scale (1/N of an average, the postscale factor) is
        applied and the result rounded, in the same pass.
        """
        ...

    def inner(self, a: Array, b: Array) -> float:
        """The dot product of two arrays in float64 (Adasum)."""
        ...

    def blend(self, out: Array, a: Array, a_factor: float, b: Array, b_factor: float) -> None:
        """out[:] = a_factor * a + b_factor * b; out may be a or b (Adasum)."""
        ...


# --- Transport: carries bytes between ranks; knows no collective ---------------------------------------------------


class Message(NamedTuple):
    """A message that has arrived and that no posted receive asked for."""

    peer: int
    tag: int
    size_bytes: int


class Mailbox(Protocol):
    """Messages of one tag and of a limited length, from and to any rank, in memory that is used again and again.

    What carries them is prepared once per length, so that a message costs a third of what ``send`` and ``recv`` do.
    """

    outgoing: Array
    """Bytes that the next ``post`` sends; not to be written while ``posting``."""

    incoming: Array
    """Bytes of the last message received, until ``receive`` is called again."""

    def post(self, nbytes: int, peer: int) -> None:
        """Begin to send the first bytes of ``outgoing``."""
        ...

    @property
    def posting(self) -> bool:
        """Something is still leaving ``outgoing``; it goes on only with ``flush``. Any thread may ask."""
        ...

    def flush(self) -> bool:
        """Let it go on. True when a message has left."""
        ...

    def receive(self) -> tuple[int, int] | None:
        """The sender and the length of the next message that has arrived, whoever sent it, or None."""
        ...


class Transport(Protocol):
    """An ordered group of processes with a message space of its own: an MPI communicator, or a simulated one.

    Nothing here blocks. One thread at a time may call it (the engine's progress lock sees to that).
    Messages from one peer with one tag are received in the order in which they were sent.
    """

    rank: int
    size: int
    max_tag: int
    sent_bytes: int

    def send(self, buffer: Array, peer: int, tag: int, whole: bool = False) -> Token:
        """Begin to send.

        Args:
            whole: never cut in pieces; for a message whose length the receiver learns by ``probe``, on both sides.
        """
        ...

    def recv(self, buffer: Array, peer: int, tag: int, whole: bool = False) -> Token:
        """Begin to receive."""
        ...

    def done(self, tokens: Sequence[Token]) -> bool:
        """True when all are complete; makes progress on everything under way. Raises PeerLostError."""
        ...

    def probe(self, tag: int | None = None) -> Message | None:
        """The first arrived message that no posted receive matches, of this tag or of any."""
        ...

    def abandon(self, receives: Sequence[Token], others: Sequence[Token]) -> None:
        """Nobody waits for these any more. Their memory is kept until ``close``, which ends the receives."""
        ...

    def mailbox(self, tag: int, capacity: int) -> Mailbox:
        """Messages of up to ``capacity`` bytes on a tag on which nothing is received otherwise."""
        ...

    def native(self, instruction: Native, tag: int) -> Token: ...

    def subgroup(self, ranks: Sequence[int]) -> Transport | None:
        """Collective over all ranks of this transport: a new message space for ``ranks``; None elsewhere."""
        ...

    def close(self) -> None:
        """Collective: gives the message space back. Nothing may be under way."""
        ...


# --- Compression: pure maths; asks the engine to communicate --------------------------------------------------------


class Parameter(NamedTuple):
    """What a compressor may know of a gradient beyond its values."""

    name: str
    shape: tuple[int, ...]


class SumRequest(NamedTuple):
    """Reply: ``scale`` times the elementwise sum over ranks, accumulated in float32 (or wider) and rounded once, in a
    flat array of the same type (integers are truncated toward zero).

    The scale is part of the request so that a mean of 16-bit floats can't overflow on the way: 40000 and 40000 give
    40000. The request's array is not written to, and the reply is the compressor's own.
    """

    array: Array
    scale: float = 1.0


class GatherRequest(NamedTuple):
    """Reply: every rank's payload (a list in rank order); payloads may differ in length."""

    payload: Array


class AllToAllRequest(NamedTuple):
    """``payloads[i]`` goes to rank i. Reply: the payloads sent to this rank (a list in rank order)."""

    payloads: Sequence[Array]


class Reduced(NamedTuple):
    """What a compressor returns, one flat array per gradient each.

    ``mean`` is what every rank now holds (the same bits everywhere); ``contributed`` is what this rank effectively
    put in, so that error feedback is ``residual = gradient - contributed`` around any compressor.
    """

    mean: Sequence[Array]
    contributed: Sequence[Array]


CompressorRequest: TypeAlias = SumRequest | GatherRequest | AllToAllRequest


class Compressor(Protocol):
    """What goes on the wire in place of a bucket's gradients, and how it is read back.

    Scale and selection are per gradient, packing is per bucket: one request carries all gradients of the bucket.
    """

    def bind(self, parameters: Sequence[Parameter]) -> Compressor:
        """The compressor for a bucket of exactly these parameters; called once, when the bucket is planned.

        Pure: returns itself, or a copy that knows shapes (matrices) and names (patterns).
        """
        ...

    def reduce(
        self, gradients: Sequence[Array], states: Sequence[MutableMapping[str, Any]], group: Group
    ) -> Generator[CompressorRequest, Any, Reduced]:
        """Exchange one bucket.

        Args:
            gradients: flat arrays of one type, one per parameter; read only.
            states: one mapping per gradient, kept from step to step and saved with the optimizer (``"residual"``,
                ``"warm_start"``, ...); values are flat arrays or plain numbers.
            group: this rank's place; the mean is over ``group.size`` ranks.
        """
        ...


