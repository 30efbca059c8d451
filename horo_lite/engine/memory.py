"""Where buckets live: in memory shared by the ranks of a node where that works, else in a rank's own."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Generator
from typing import Any

import numpy as np

from horo_lite.arrays import numpy_dtype
from horo_lite.buckets import BucketPlan
from horo_lite.engine.fabric import Fabric
from horo_lite.engine.sharing import shared_blocks
from horo_lite.interfaces import Array
from horo_lite.transport.shared import SharedBlock

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


@functools.cache
def keep_freed(nbytes: int) -> None:
    """Let malloc keep up to about ``nbytes`` that were freed, where it is glibc's; 0 leaves it as it is.

    A gradient's own memory is freed once the gradient lies in its bucket. By default the pages go back to the system,
    which clears others for the next gradient: of the step of a ResNet-18 that was a tenth, at 9,000 faults.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if nbytes and mallopt is not None:
        for threshold in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(threshold, min(nbytes, 2**31 - 1))


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

        place = device.removeprefix("torch-")  # "torch-cpu": tensors in host memory (``arrays.kernel``)
        return BucketMemory(
            [torch.zeros(b.elements, dtype=getattr(torch, b.type_name), device=place) for b in plan.buckets]
        )
    whole = np.zeros(plan.nbytes, np.uint8)
    return BucketMemory(_arrays(plan, whole))


def shared_memory(plan: BucketPlan, fabric: Fabric) -> Generator[Any, Any, BucketMemory]:
    """Schedule: buckets in memory mapped by all ranks of the node; private memory where one of them can't."""
    blocks = yield from shared_blocks(plan.nbytes, fabric)
    if not blocks:
        return private_memory(plan)
    arrays = [_arrays(plan, block.array("uint8", 0, plan.nbytes)) for block in blocks]
    peers = [list(of_bucket) for of_bucket in zip(*arrays, strict=True)]
    own = fabric.topology.local_ranks.index(fabric.group.index)
    return BucketMemory(arrays[own], peers, blocks)


def _arrays(plan: BucketPlan, whole: Array) -> list[Array]:
    return [
        whole[b.offset_bytes : b.offset_bytes + b.nbytes].view(numpy_dtype(b.type_name)) for b in plan.buckets
    ]
