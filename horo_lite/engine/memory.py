"""Where buckets live: in memory shared by the ranks of a node where that works, else in memory of this rank's own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Generator
from typing import Any

import numpy as np

from horo_lite.arrays import numpy_dtype
from horo_lite.buckets import BucketPlan
from horo_lite.engine.agree import gather_bytes
from horo_lite.engine.fabric import Fabric
from horo_lite.interfaces import Array
from horo_lite.transport.shared import SharedBlock, SharedMemoryError

_log = logging.getLogger("horo_lite")


@dataclasses.dataclass
class BucketMemory:
    """The flat array of each bucket of a plan.

    Attributes:
        mine: this rank's.
        peers: per bucket, those of the ranks of this node in order, this rank's own included; None where they can't
            be seen.
        blocks: what keeps shared memory mapped.
    """

    mine: list[Array]
    peers: list[list[Array]] | None = None
    blocks: list[SharedBlock] = dataclasses.field(default_factory=list)

    def close(self) -> None:
        """Let go; memory that arrays still look at stays mapped."""
        for block in self.blocks:
            block.close()
        self.blocks, self.peers = [], None


def private_memory(plan: BucketPlan, device: str = "cpu") -> BucketMemory:
    """Memory of this process alone, zeroed; on a device as torch tensors."""
    if device != "cpu":
        import torch  # the script's own: a device was named

        return BucketMemory(
            [torch.zeros(b.elements, dtype=getattr(torch, b.type_name), device=device) for b in plan.buckets]
        )
    whole = np.zeros(plan.nbytes, np.uint8)
    return BucketMemory(_arrays(plan, whole))


def shared_memory(plan: BucketPlan, fabric: Fabric) -> Generator[Any, Any, BucketMemory]:
    """Schedule: one shared block per rank, mapped by all ranks of its node; private memory where one of them can't.

    Every member of the process set takes part and all decide alike, so that all run the same schedules.
    """
    local = fabric.topology.local_ranks
    block: SharedBlock | None = None
    token = b""
    if fabric.shares_memory and plan.nbytes:
        try:
            block = SharedBlock.create(plan.nbytes)
            token = block.token.encode()
        except SharedMemoryError as error:
            _log.info("gradients are not shared by this node's ranks: %s", error)
    tokens = yield from gather_bytes(token, fabric)
    blocks: list[SharedBlock] = []
    if block is not None and all(tokens[rank] for rank in local):
        try:
            own = fabric.group.index
            blocks = [
                block if rank == own else SharedBlock.attach(tokens[rank].decode(), plan.nbytes) for rank in local
            ]
        except SharedMemoryError as error:
            _log.info("gradients are not shared by this node's ranks: %s", error)
    answers = yield from gather_bytes(b"1" if blocks else b"0", fabric)
    if block is not None:
        block.unlink()
    if b"0" in answers or block is None:
        for mapped in blocks:
            mapped.close()
        return private_memory(plan)
    arrays = [_arrays(plan, b.array("uint8", 0, plan.nbytes)) for b in blocks]
    peers = [list(of_bucket) for of_bucket in zip(*arrays, strict=True)]
    return BucketMemory(arrays[local.index(fabric.group.index)], peers, blocks)


def _arrays(plan: BucketPlan, whole: Array) -> list[Array]:
    return [
        whole[b.offset_bytes : b.offset_bytes + b.nbytes].view(numpy_dtype(b.type_name)) for b in plan.buckets
    ]
