"""The selection table of a set of hosts: measured once, by the first operation that asks for it, then remembered.

Across nodes latency and bandwidth differ a thousandfold from cluster to cluster, so they are measured between rank 0
and a rank of another node, and algorithms are chosen by their cost functions; on one node the algorithms themselves
are tried out (``trial``). Either takes 0.3 s at most. Rank 0's table is sent to all, so that all choose alike.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import socket
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from horo_lite.collectives.selection import Machine, Table
from horo_lite.engine.sharing import gather_bytes
from horo_lite.engine.trial import try_algorithms
from horo_lite.errors import ArgumentError
from horo_lite.interfaces import Recv, Send, Wait

if TYPE_CHECKING:
    from horo_lite.engine.fabric import Fabric

_log = logging.getLogger("horo_lite")
_EMPTY_ROUNDS = 8
_ENOUGH_S = 0.04  # a message that takes this long settles the bandwidth; all together take four times that at most
_FIRST_BYTES = 4 << 10
_LARGEST_BYTES = 4 << 20


def find_table(fabric: Fabric, folder: str) -> Generator[Any, Any, Table]:
    """Schedule: the table for these hosts, from rank 0's cache or measured now; the same on every member."""
    name = f"{socket.gethostname()} {os.cpu_count()} {fabric.stages} {fabric.instruments.library}"
    hosts = yield from gather_bytes(name.encode(), fabric)
    path = _cache_path(folder, hosts)
    cached = _read(path) if fabric.group.index == 0 else None
    texts = yield from gather_bytes((cached or "").encode(), fabric)
    if not texts[0]:
        complete = True
        if len(fabric.topology.nodes) > 1:
            table = Table(machine=(yield from _measure(fabric)))
        else:
            rows, complete = yield from try_algorithms(fabric)
            table = Table(rows=rows)
        text = table.to_json() if fabric.group.index == 0 else ""
        texts = yield from gather_bytes(text.encode(), fabric)
        if fabric.group.index == 0 and complete:  # what a busy machine left no time for is measured by the next job
            _write(path, text)
    table = Table.from_json(texts[0].decode())
    if fabric.group.index == 0:
        _log.info("%s", describe(table, fabric))
    return table


def describe(table: Table, fabric: Fabric) -> str:
    """The table's choices for all-reduce on this layout, for people."""
    nodes = fabric.topology.nodes
    measured = table.limits(
        "allreduce", ranks=fabric.size, ranks_per_node=min(map(len, nodes)), context=fabric.offered(staged=True)
    )
    settled = [(fabric.travelling_bytes, "gathered"), (fabric.laid_out_bytes, "shared")]
    limits: list[tuple[int, str]] = []
    for bound, name in [*settled, *measured]:
        if bound > max([0, *[earlier for earlier, _ in limits]]):
            if limits and limits[-1][1] == name:
                limits.pop()
            limits.append((bound, name))
    choices = ", ".join(f"{name} up to {_size(bound)}" for bound, name in limits[:-1])
    last = limits[-1][1]
    where = "one node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    return f"all-reduce over {fabric.size} ranks on {where}: {choices and choices + ', then '}{last}"


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB" if nbytes >= 1 << 10 else f"{nbytes} B"


def _measure(fabric: Fabric) -> Generator[Any, Any, Machine]:
    """Schedule: latency and bandwidth between member 0 and the first member of another node."""
    partner = fabric.topology.nodes[1][0]
    own = fabric.group.index
    if own not in (0, partner):
        return Machine()
    peer = partner if own == 0 else 0
    rounds = []
    for _ in range(_EMPTY_ROUNDS):
        rounds.append((yield from _round_trip(own, peer, 0, 0)))
    latency_s = sorted(rounds)[len(rounds) // 2] / 2
    nbytes, took_s = _FIRST_BYTES // 2, 0.0
    while nbytes < _LARGEST_BYTES and took_s < _ENOUGH_S:
        nbytes *= 2
        # Only in one direction: a shaper lets a burst of 100 KiB and more through at once, and fills up again while the
        # link is idle. The messages before have used up what a message of twice their length would find.
        took_s = yield from _round_trip(own, peer, nbytes, back=0)
        # Both must stop at the same size: the partner goes by member 0's clock.
        took_s = yield from _told(own, peer, took_s)
    bandwidth = nbytes / max(took_s - 2 * latency_s, 1e-7)
    return dataclasses.replace(Machine(), latency_s=max(latency_s, 1e-7), bandwidth=bandwidth)


def _round_trip(own: int, peer: int, there: int, back: int) -> Generator[Any, Any, float]:
    """Schedule: so many bytes from member 0 to its partner, and back."""
    outgoing, incoming = np.zeros(there, np.uint8), np.zeros(back, np.uint8)
    started = time.perf_counter()
    if own == 0:
        yield Wait([(yield Send(outgoing, peer))])
        yield Wait([(yield Recv(incoming, peer))])
    else:
        yield Wait([(yield Recv(outgoing, peer))])
        yield Wait([(yield Send(incoming, peer))])
    return time.perf_counter() - started


def _told(own: int, peer: int, value: float) -> Generator[Any, Any, float]:
    box = np.array([value])
    yield Wait([(yield Send(box, peer) if own == 0 else Recv(box, peer))])
    return float(box[0])


def _cache_path(folder: str, hosts: list[bytes]) -> Path | None:
    if not folder:
        return None
    name = hashlib.blake2b(b"\n".join(hosts), digest_size=12).hexdigest()
    try:
        return Path(folder).expanduser() / f"selection-{name}.json"
    except RuntimeError:  # there is no home
        return None


def _read(path: Path | None) -> str | None:
    """A table from the cache; a file that can't be read or is damaged is as good as none."""
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
        Table.from_json(text)
    except (OSError, ArgumentError, UnicodeDecodeError):
        return None
    return text


def _write(path: Path | None, text: str) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)  # another job may read it at this moment
    except OSError as error:
        _log.debug("the selection table is not kept: %s", error)
