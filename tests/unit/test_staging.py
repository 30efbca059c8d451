"""Device tensors over host messages: the same values as numpy by every algorithm, in order, without waiting.

Tensors of the host stand for a device's: what differs is only who copies, and here copies end when the test says so.
"""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from horo_lite.arrays import ArrayKernel, kernel, numpy_dtype, to_torch  # noqa: E402
from horo_lite.collectives import algorithm, algorithms, partition  # noqa: E402
from horo_lite.config import Config  # noqa: E402
from horo_lite.engine import Fabric  # noqa: E402
from horo_lite.engine.agreement import Signature, disagreement  # noqa: E402
from horo_lite.engine.instruments import Instruments  # noqa: E402
from horo_lite.errors import PeerLostError  # noqa: E402
from horo_lite.interfaces import Array, Group, Native, Reduction, Schedule, Transport  # noqa: E402
from horo_lite.transport import cuda  # noqa: E402
from horo_lite.transport.driver import Running  # noqa: E402
from horo_lite.transport.loopback import LoopbackNetwork  # noqa: E402
from horo_lite.transport.staging import PlainCopies, StagedTransport  # noqa: E402
from horo_lite.transport.topology import Topology  # noqa: E402
from tests.contracts.collectives import node_layouts  # noqa: E402

TYPES = ("float32", "float16", "bfloat16", "int32", "float64")
ELEMENTS = (0, 1, 2, 7, 1023)
POLLS = 50_000


class LateCopies(PlainCopies):
    """Copies of which each is done, all at once, after some looks at it, as the seed decides."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.under_way = 0

    def start(self, out: Any, source: Any) -> LateCopy:
        self.under_way += 1
        return LateCopy(self, out, source, self._random.randrange(4))


class LateCopy:
    def __init__(self, copies: LateCopies, out: Any, source: Any, looks: int) -> None:
        self._copies, self._out, self._source, self._looks = copies, out, source, looks

    def query(self) -> bool:
        self._looks -= 1
        if self._looks >= 0:
            return False
        if self._source is not None:
            self._out.copy_(self._source)
            self._source = None
            self._copies.under_way -= 1
        return True


def run(size: int, program: Callable[[int], Schedule], tensors: bool, seed: int = 0) -> None:
    """``program(rank)`` on every rank in turn, over messages and, for tensors, copies that take their time."""
    network = LoopbackNetwork(size, seed=seed)
    endpoints: list[Transport] = [network.endpoint(rank) for rank in range(size)]
    copies = LateCopies(seed)
    if tensors:
        endpoints = [StagedTransport(endpoint, lambda device: copies) for endpoint in endpoints]
    running = [Running(program(rank), endpoint, 5) for rank, endpoint in enumerate(endpoints)]
    for _ in range(POLLS):
        if all(one.finished for one in running):
            break
        for one in running:
            if not one.finished:
                one.advance()
    assert all(one.finished for one in running), "the schedules wait for one another"
    assert copies.under_way == 0


def inputs(size: int, elements: int, name: str) -> list[np.ndarray]:
    """Values whose float sum depends on the order of adding."""
    generator = np.random.default_rng(elements)
    values = generator.standard_normal((size, elements)) * 10.0 ** generator.integers(-2, 3, (size, elements))
    return [row.astype(numpy_dtype(name)) for row in values]


def both_ways(
    size: int, arrays: Sequence[np.ndarray], program: Callable[[int, Array, str], Schedule]
) -> tuple[list[bytes], list[bytes]]:
    """Each rank's buffer after ``program(rank, buffer, device)``: as numpy arrays, and as tensors."""
    host = [array.copy() for array in arrays]
    run(size, lambda rank: program(rank, host[rank], "cpu"), tensors=False)
    memory = [array.copy() for array in arrays]
    tensors = [to_torch(array) for array in memory]
    run(size, lambda rank: program(rank, tensors[rank], "torch-cpu"), tensors=True, seed=size)
    return [array.tobytes() for array in host], [array.tobytes() for array in memory]


def sum_kernel(name: str, size: int, device: str, reduction: Reduction = Reduction.SUM) -> ArrayKernel:
    return kernel(name, reduction, size, device=device)


def allreduces(wide: bool) -> list[str]:
    own_memory = {"nodes", "segment_elements", "reduction"}
    return sorted(
        name for name, entry in algorithms("allreduce").items()
        if entry.needs <= own_memory and (entry.wide or not wide)
    )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", TYPES)
def test_every_allreduce_gives_numpys_bits(name: str, size: int) -> None:
    for reduction in (Reduction.SUM, Reduction.AVERAGE, Reduction.MAX):
        for elements in ELEMENTS:
            wide = sum_kernel(name, size, "cpu", reduction).wide
            for chosen in allreduces(wide):
                if chosen == "native" and (name == "bfloat16" or reduction is not Reduction.SUM):
                    continue

                def program(
                    rank: int, buffer: Array, device: str, chosen: str = chosen, reduction: Reduction = reduction
                ) -> Schedule:
                    return algorithm("allreduce", chosen)(
                        Group.whole(rank, size), buffer, sum_kernel(name, size, device, reduction),
                        segment_elements=16, nodes=node_layouts(size)[-1], reduction=reduction,
                    )

                host, staged = both_ways(size, inputs(size, elements, name), program)
                assert host == staged, (chosen, name, reduction, elements)


@pytest.mark.parametrize("operation", ["reduce_scatter", "allgather"])
def test_every_scatter_and_gather_gives_numpys_bits(operation: str) -> None:
    size, counts = 3, (5, 0, 18)
    for chosen in algorithms(operation):

        def program(rank: int, buffer: Array, device: str, chosen: str = chosen) -> Schedule:
            arithmetic = (sum_kernel("float32", size, device),) if operation == "reduce_scatter" else ()
            entry = algorithm(operation, chosen)
            return entry(Group.whole(rank, size), buffer, counts, *arithmetic, segment_elements=4)

        host, staged = both_ways(size, inputs(size, sum(counts), "float32"), program)
        if operation == "allgather":
            assert host == staged, chosen
        else:  # elsewhere than in its own chunk a rank holds what is left over
            starts = partition.offsets_of(counts)
            for rank in range(size):
                own = slice(4 * starts[rank], 4 * starts[rank + 1])
                assert host[rank][own] == staged[rank][own], chosen


def test_every_broadcast_gives_the_roots_bits() -> None:
    for chosen in sorted(algorithms("broadcast")):
        for root in range(3):

            def program(rank: int, buffer: Array, device: str, chosen: str = chosen, root: int = root) -> Schedule:
                return algorithm("broadcast", chosen)(Group.whole(rank, 3), buffer, root, segment_elements=8)

            arrays = inputs(3, 100, "float32")
            host, staged = both_ways(3, arrays, program)
            assert host == staged == [arrays[root].tobytes()] * 3, (chosen, root)


def test_adasum_gives_numpys_values() -> None:
    def program(rank: int, buffer: Array, device: str) -> Schedule:
        arithmetic = kernel("float64", Reduction.ADASUM, 3, device=device)
        return algorithm("adasum", "halving_doubling")(Group.whole(rank, 3), buffer, arithmetic)

    host, staged = both_ways(3, inputs(3, 64, "float64"), program)
    for left, right in zip(host, staged, strict=True):
        np.testing.assert_allclose(np.frombuffer(left), np.frombuffer(right), rtol=1e-12)
    assert len(set(staged)) == 1


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_what_the_engine_asks_for_works_on_tensors(name: str) -> None:
    """The fabric's own choice of algorithm, for small and for large messages."""
    size = 2
    for elements in (10, 50_000):
        fabrics: dict[str, list[Fabric]] = {}

        def program(
            rank: int, buffer: Array, device: str, fabrics: dict[str, list[Fabric]] = fabrics
        ) -> Schedule:
            if device not in fabrics:
                network = LoopbackNetwork(size)
                fabrics[device] = [
                    Fabric(
                        network.endpoint(member), (0, 1), Topology(member, ((0, 1),)), Config(), Instruments()
                    )
                    for member in range(size)
                ]
            return fabrics[device][rank].allreduce(buffer, name, Reduction.AVERAGE, device=device, staged=False)[0]

        host, staged = both_ways(size, inputs(size, elements, name), program)
        assert host == staged


# --- the order of messages and their life ----------------------------------------------------------------------------


def pair(seed: int = 1) -> tuple[StagedTransport, StagedTransport, LateCopies]:
    network = LoopbackNetwork(2, eager_bytes=0)
    copies = LateCopies(seed)
    left, right = (StagedTransport(network.endpoint(rank), lambda device: copies) for rank in range(2))
    return left, right, copies


def finish(*sides: tuple[StagedTransport, Sequence[Any]]) -> None:
    for _ in range(POLLS):
        if all([transport.done(tokens) for transport, tokens in sides]):  # noqa: C419  (each must be polled)
            return
    raise AssertionError("messages are still under way")


@pytest.mark.parametrize("seed", range(5))
def test_host_and_device_messages_keep_their_order(seed: int) -> None:
    left, right, _ = pair(seed)
    outgoing = [torch.full((3,), index) if index % 2 else np.full(3, index) for index in range(10)]
    incoming = [np.zeros(3, np.int64) if index % 3 else torch.zeros(3, dtype=torch.int64) for index in range(10)]
    received = [right.recv(buffer, 0, 7) for buffer in incoming]
    sent = [left.send(buffer, 1, 7) for buffer in outgoing]
    finish((left, sent), (right, received))
    assert [int(buffer[0]) for buffer in incoming] == list(range(10))


def test_a_send_goes_on_while_its_rank_waits_for_something_else() -> None:
    left, right, _ = pair()
    left.send(torch.ones(4), 1, 1)
    answer = np.zeros(1)
    waits = left.recv(answer, 1, 2)
    got = torch.zeros(4)
    request = right.recv(got, 0, 1)
    for _ in range(20):
        left.done((waits,))
        if right.done((request,)):
            break
    assert got.tolist() == [1, 1, 1, 1]


def test_nothing_is_copied_to_the_device_before_it_has_arrived() -> None:
    left, right, copies = pair()
    token = right.recv(torch.zeros(4), 0, 1)
    assert not right.done((token,))
    assert copies.under_way == 0
    sent = left.send(torch.ones(4), 1, 1)
    finish((left, (sent,)), (right, (token,)))
    assert token.Test(), "a token stays complete"


def test_a_failed_message_fails_each_time_it_is_asked_for() -> None:
    network = LoopbackNetwork(2)
    transport = StagedTransport(network.endpoint(0))
    token = transport.recv(torch.zeros(4), 1, 1)
    network.kill(1)
    for _ in range(2):
        with pytest.raises(PeerLostError):
            transport.done((token,))


def test_it_counts_bytes_and_passes_the_rest_on() -> None:
    left, right, _ = pair()
    sent = left.send(torch.ones(4), 1, 3), left.send(np.ones(4, np.uint8), 1, 3)
    assert left.sent_bytes == 20
    message = None
    for _ in range(20):
        message = message or right.probe(3)
        left.done(sent)
    assert message is not None and message.size_bytes == 16
    finish((left, sent), (right, [right.recv(torch.zeros(4), 0, 3), right.recv(torch.zeros(4).byte(), 0, 3)]))
    ends = left.subgroup([1, 0]), right.subgroup([1, 0])
    assert [end.rank for end in ends if end is not None] == [1, 0]
    for transport in (left, right):
        transport.close()


def test_native_operations_go_through_the_host() -> None:
    left, right, _ = pair()
    tensors = torch.full((3,), 1.0), torch.full((3,), 2.0)
    tokens = [
        transport.native(Native("allreduce", tensor, Reduction.SUM, 0), 1)
        for transport, tensor in zip((left, right), tensors, strict=True)
    ]
    finish((left, tokens[:1]), (right, tokens[1:]))
    assert [tensor.tolist() for tensor in tensors] == [[3.0] * 3] * 2


def test_ranks_may_use_different_devices_of_one_kind() -> None:
    first = Signature("allreduce", ("float32",), ((4,),), "cuda:0")
    assert disagreement("x", {0: first, 1: first._replace(device="cuda:1")}) is None
    text = disagreement("x", {0: first, 1: first._replace(device="cpu")})
    assert text is not None and "mismatched devices: rank 0: cuda; rank 1: cpu" in text


# --- device pointers ---------------------------------------------------------------------------------------------


def test_a_users_word_is_taken_and_off_is_off() -> None:
    assert cuda.is_aware("on")
    assert not cuda.is_aware("off")


@pytest.mark.parametrize(
    ("child", "reason"),
    [
        (f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})", "SIGSEGV"),
        ("raise SystemExit(3)", "no CUDA device"),
        ("raise SystemExit(4)", "other data"),
        ("raise OSError('no such library')", "no such library"),
        ("pass", ""),
    ],
)
def test_whatever_becomes_of_the_child_is_an_answer(child: str, reason: str) -> None:
    answer = cuda.why_not((sys.executable, "-S", "-c", child))
    assert reason in answer
    assert bool(answer) == bool(reason)


@pytest.mark.slow  # the child imports torch
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_the_probe_says_so() -> None:
    assert not cuda.is_aware("probe")
    assert "no CUDA device" in cuda.why_not()
