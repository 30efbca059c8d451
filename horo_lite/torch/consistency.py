"""Are all ranks' models still the same? A cheap question that finds divergence before it spoils a run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from horo_lite.arrays import flat
from horo_lite.errors import DisagreementError
from horo_lite.functions import allgather
from horo_lite.process_sets import ProcessSet, global_process_set
from horo_lite.torch.agreement import agree_on_tensors
from horo_lite.torch.compressor_states import RANK_OWN

_DIGEST_BYTES = 16


def check_consistency(
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Collective: compare parameters, buffers and optimizer state over ranks, bit by bit, by hashes.

    Args:
        model: its ``state_dict()`` is compared.
        optimizer: its state is compared, but for what a compressor keeps per rank.

    Raises:
        DisagreementError: they differ; on every rank, with the first tensor that does and the ranks.
    """
    tensors = [*_model_tensors(model), *_optimizer_tensors(optimizer)]
    agree_on_tensors("check_consistency", tensors, process_set)
    digests = np.frombuffer(b"".join(_digest(tensor) for _, tensor in tensors), np.uint8)
    whole = hashlib.blake2b(digests.tobytes(), digest_size=_DIGEST_BYTES).digest()
    everyone = allgather(np.frombuffer(whole, np.uint8), "check_consistency.whole", process_set)
    if len(np.unique(everyone.reshape(-1, _DIGEST_BYTES), axis=0)) == 1:
        return
    rows = allgather(digests, "check_consistency.each", process_set)
    rows = rows.reshape(-1, len(tensors), _DIGEST_BYTES)
    differs = (rows != rows[:1]).any(axis=2)  # (ranks, tensors)
    first = int(np.flatnonzero(differs.any(axis=0))[0])
    ranks = process_set.ranks or []
    others = [ranks[i] for i in np.flatnonzero(differs[:, first])]
    raise DisagreementError(
        f"check_consistency: {tensors[first][0]} differs from rank {ranks[0]}'s on ranks {others}; "
        f"{int(differs.any(axis=0).sum())} of {len(tensors)} tensors differ. Broadcast the parameters and the "
        "optimizer state at the start, and update them on all ranks alike"
    )


def _model_tensors(model: torch.nn.Module | None) -> Iterator[tuple[str, torch.Tensor]]:
    state = {} if model is None else model.state_dict()
    for name in sorted(state):
        if isinstance(state[name], torch.Tensor):
            yield name, state[name]


def _optimizer_tensors(optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, torch.Tensor]]:
    state: Any = {} if optimizer is None else optimizer.state_dict()["state"]
    for number in sorted(state):
        for key in sorted(set(state[number]) - RANK_OWN):
            if isinstance(state[number][key], torch.Tensor):
                yield f"optimizer state {number}.{key}", state[number][key]


def _digest(tensor: torch.Tensor) -> bytes:
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    values = flat(tensor.detach().cpu())
    return hashlib.blake2b(values.view(np.uint8), digest_size=_DIGEST_BYTES).digest()
