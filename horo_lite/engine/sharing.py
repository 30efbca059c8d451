"""How the ranks of a node come to share memory: one block each, attached by all, or none at all."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from horo_lite.transport.shared import NoRoomError, SharedBlock, SharedMemoryError

if TYPE_CHECKING:
    from horo_lite.engine.fabric import Fabric

_log = logging.getLogger("horo_lite")

_MAPPED, _UNSEEN, _NONE = b"1", b"?", b"0"  # has all blocks; can't see one, or make one without a name; can't make one
_AT_ONCE_BYTES = 120  # with the length before it, a message of 128


def gather_bytes(own: bytes, fabric: Fabric) -> Generator[Any, Any, list[bytes]]:
    """Schedule: every member's bytes, of any lengths, in order. One round where all are short, else two."""
    record = np.zeros(8 + _AT_ONCE_BYTES, np.uint8)
    record[:8].view(np.int64)[0] = len(own)
    content = np.frombuffer(own, np.uint8)
    beginning = content[:_AT_ONCE_BYTES]
    record[8 : 8 + len(beginning)] = beginning
    records = np.empty((fabric.size, len(record)), np.uint8)
    yield from fabric.allgather(record, records.reshape(-1), [len(record)] * fabric.size)
    counts = [int(n) for n in records[:, :8].copy().view(np.int64)[:, 0]]
    if max(counts) <= _AT_ONCE_BYTES:
        return [row[8 : 8 + n].tobytes() for row, n in zip(records, counts, strict=True)]
    whole = np.empty(sum(counts), np.uint8)
    yield from fabric.allgather(content, whole, counts)
    ends = np.cumsum(counts)
    return [whole[end - n : end].tobytes() for end, n in zip(ends, counts, strict=True)]


def shared_blocks(nbytes: int, fabric: Fabric, named: bool = False) -> Generator[Any, Any, list[SharedBlock]]:
    """Schedule: the blocks of all ranks of this node, in order; none where any rank of any node can't map them.

    Every member of the process set takes part, and all decide alike, so that all go on with the same schedules.

    Args:
        named: make files that have a name at first; tried where some rank can't see others' files without.
    """
    local = fabric.topology.local_ranks
    own = fabric.group.index
    block, answer, reason = None, _NONE, ""
    if fabric.shares_memory and nbytes:
        try:
            block, answer = SharedBlock.create(nbytes, named=named), _UNSEEN
        except SharedMemoryError as error:
            answer = _NONE if isinstance(error, NoRoomError) else _UNSEEN
            reason = str(error)
    tokens = yield from gather_bytes(b"" if block is None else block.token.encode(), fabric)
    blocks: list[SharedBlock] = []
    if block is not None and all(tokens[rank] for rank in local):
        try:
            blocks = [
                block if rank == own else SharedBlock.attach(tokens[rank].decode(), nbytes) for rank in local
            ]
            answer = _MAPPED
        except SharedMemoryError as error:
            reason = str(error)
    answers = yield from gather_bytes(answer, fabric)
    if block is not None:
        block.conceal()
    if set(answers) == {_MAPPED}:
        return blocks
    for mapped in blocks or ([block] if block is not None else []):
        mapped.close()
    if _NONE not in answers and not named:
        return (yield from shared_blocks(nbytes, fabric, named=True))
    if reason:
        _log.info("this node's ranks share no memory: %s", reason)
    return []
