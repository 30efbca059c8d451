"""What the user asked of a distributed optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from horo_lite.interfaces import Reduction
from horo_lite.process_sets import ProcessSet
from horo_lite.torch.names import Naming


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the user asked ``DistributedOptimizer`` for; see there."""

    naming: Naming
    compression: Any
    passes: int
    op: Reduction
    predivide: float
    groups: int | Sequence[Sequence[torch.Tensor]] | None
    sparse_as_dense: bool
    process_set: ProcessSet
    average_over_passes: bool
    clip_norm: float | None
    bucket_bytes: int | None
    overlap: bool | str
