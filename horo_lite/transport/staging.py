"""Device tensors over a transport that carries host memory: through pinned buffers, without waiting for a copy.

::

    send:  device --copy on a side stream--> pinned buffer --message-->
    recv:  --message--> pinned buffer --copy on a side stream--> device

A message is complete when its last stage is. The schedules cut their data into segments, so one segment is copied
while the one before it is on the wire. torch keeps pinned buffers for reuse, so a step pins no memory anew.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from horo_lite.arrays import as_bytes, numpy_dtype, type_name
from horo_lite.interfaces import Array, Mailbox, Message, Native, Token, Transport


class Copied(Protocol):
    """A copy under way: a CUDA event, or something like it."""

    def query(self) -> bool:
        """True once the copy is done."""
        ...


class Copies(Protocol):
    """Copies between one device and the host."""

    def host(self, nbytes: int) -> Any:
        """Memory for one message, as a tensor of bytes."""
        ...

    def start(self, out: Any, source: Any) -> Copied:
        """Begin ``out[:] = source``, after all that this thread has queued on the device."""
        ...


class Done:
    """A copy that was over when ``start`` returned."""

    def query(self) -> bool:
        """Always True."""
        return True


class PlainCopies:
    """Copies that wait: for devices without streams of which this package knows, and for tests without a device."""

    def host(self, nbytes: int) -> Any:
        """Ordinary memory."""
        torch: Any = sys.modules["torch"]
        return torch.empty(nbytes, dtype=torch.uint8)

    def start(self, out: Any, source: Any) -> Copied:
        """Copy now."""
        out.copy_(source)
        return Done()


class CudaCopies:
    """Copies on a stream of their own, in both directions. ROCm devices are torch's "cuda" as well.

    Args:
        device: the tensors' device.
    """

    def __init__(self, device: Any) -> None:
        self._cuda: Any = sys.modules["torch"].cuda
        self._device = device
        self._stream = self._cuda.Stream(device)

    def host(self, nbytes: int) -> Any:
        """Pinned memory: only from there does a copy run beside everything else."""
        torch: Any = sys.modules["torch"]
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def start(self, out: Any, source: Any) -> Copied:
        """Queue the copy behind this thread's kernels, which may still write the source or read the target."""
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            out.copy_(source, non_blocking=True)
            event = self._cuda.Event()
            event.record(self._stream)
        return event  # type: ignore[no-any-return]


@functools.cache
def copies_for(device: Any) -> Copies:
    """How tensors of a device are copied."""
    return CudaCopies(device) if device.type == "cuda" else PlainCopies()


Steps: TypeAlias = Generator[None, None, None]


class Staged:
    """A message of several stages. Its token: tested like an MPI request."""

    __slots__ = ("_error", "_steps")

    def __init__(self, steps: Steps) -> None:
        self._steps: Steps | None = steps
        self._error: Exception | None = None

    def Test(self) -> bool:
        """Go on as far as possible without waiting; True when complete."""
        if self._error is not None:
            raise self._error
        if self._steps is not None:
            try:
                next(self._steps)
                return False
            except StopIteration:
                self._steps = None  # lets go of the host memory
            except Exception as error:
                self._error = error
                raise
        return True


class StagedTransport:
    """A transport for numpy arrays and device tensors (``interfaces.Transport``).

    Args:
        inner: carries numpy arrays; it belongs to this object from now on.
        copies: how a device's tensors are copied.
    """

    def __init__(self, inner: Transport, copies: Callable[[Any], Copies] = copies_for) -> None:
        self._inner = inner
        self._copies = copies
        self._outbox: deque[Staged] = deque()  # to be sent in this order, which is that of their matching
        self._entered = 0  # into the outbox, ever
        self._posted = 0
        self.rank = inner.rank
        self.size = inner.size
        self.max_tag = inner.max_tag
        self.sent_bytes = 0

    def send(self, buffer: Array, peer: int, tag: int, whole: bool = False) -> Token:
        self.sent_bytes += buffer.nbytes
        if isinstance(buffer, np.ndarray):
            if not self._outbox:
                return self._inner.send(buffer, peer, tag, whole)
            return self._enter(self._send_host(self._entered, buffer, peer, tag, whole))
        return self._enter(self._send_device(self._entered, buffer, peer, tag, whole))

    def recv(self, buffer: Array, peer: int, tag: int, whole: bool = False) -> Token:
        if isinstance(buffer, np.ndarray):
            return self._inner.recv(buffer, peer, tag, whole)
        copies = self._copies(buffer.device)
        host = copies.host(buffer.nbytes)
        arrival = self._inner.recv(host.numpy(), peer, tag, whole)
        return Staged(self._receive_device(arrival, host, buffer, copies))

    def done(self, tokens: Sequence[Token]) -> bool:
        self.advance()
        return all(
            token.Test() if isinstance(token, Staged) else self._inner.done((token,)) for token in tokens
        )

    def probe(self, tag: int | None = None) -> Message | None:
        self.advance()
        return self._inner.probe(tag)

    def abandon(self, receives: Sequence[Token], others: Sequence[Token]) -> None:
        self._inner.abandon([token for token in receives if not isinstance(token, Staged)], others)

    def mailbox(self, tag: int, capacity: int) -> Mailbox:
        return self._inner.mailbox(tag, capacity)

    def native(self, instruction: Native, tag: int) -> Token:
        if isinstance(instruction.buffer, np.ndarray):
            return self._inner.native(instruction, tag)
        return Staged(self._native_device(instruction, tag))

    def subgroup(self, ranks: Sequence[int]) -> StagedTransport | None:
        inner = self._inner.subgroup(ranks)
        return None if inner is None else StagedTransport(inner, self._copies)

    def close(self) -> None:
        self._inner.close()

    def advance(self) -> None:
        """Send what has reached the host. Whoever waits for anything calls it, or a peer would wait for ever."""
        while self._outbox:
            first = self._outbox[0]
            first.Test()
            if self._outbox and self._outbox[0] is first:
                return

    # --- stages ------------------------------------------------------------------------------------------------------

    def _enter(self, steps: Steps) -> Staged:
        self._entered += 1
        token = Staged(steps)
        self._outbox.append(token)
        token.Test()
        return token

    def _send_device(self, number: int, buffer: Array, peer: int, tag: int, whole: bool) -> Steps:
        copies = self._copies(buffer.device)
        host = copies.host(buffer.nbytes)
        copied = copies.start(host, as_bytes(buffer))
        while not copied.query():
            yield
        yield from self._send_host(number, host.numpy(), peer, tag, whole)

    def _send_host(self, number: int, buffer: Array, peer: int, tag: int, whole: bool) -> Steps:
        while self._posted != number:
            yield
        token = self._inner.send(buffer, peer, tag, whole)
        self._outbox.popleft()
        self._posted += 1
        while not self._inner.done((token,)):
            yield

    def _receive_device(self, arrival: Token, host: Any, buffer: Array, copies: Copies) -> Steps:
        while not self._inner.done((arrival,)):
            yield
        copied = copies.start(as_bytes(buffer), host)
        while not copied.query():
            yield

    def _native_device(self, instruction: Native, tag: int) -> Steps:
        buffer = instruction.buffer
        copies = self._copies(buffer.device)
        host = copies.host(buffer.nbytes)
        copied = copies.start(host, as_bytes(buffer))
        while not copied.query():
            yield
        typed = host.numpy().view(numpy_dtype(type_name(buffer)))
        token = self._inner.native(instruction._replace(buffer=typed), tag)
        yield from self._receive_device(token, host, buffer, copies)
