"""Sharing out data over ranks, and finding out when that went wrong."""

from __future__ import annotations

import hashlib
import pickle
import warnings
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.distributed import DistributedSampler as _TorchSampler

from horo_lite import context
from horo_lite.functions import allgather_object
from horo_lite.process_sets import ProcessSet, global_process_set


class DistributedSampler(_TorchSampler):
    """torch's ``DistributedSampler`` with this world's size and rank; call ``set_epoch`` before each epoch.

    Args:
        dataset, shuffle, seed, drop_last: as torch takes them.
        num_replicas, rank: by default ``size()`` and ``rank()``.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        replicas = context.size() if num_replicas is None else num_replicas
        own = context.rank() if rank is None else rank
        super().__init__(dataset, replicas, own, shuffle, seed, drop_last)


def check_shards(data: Any, process_set: ProcessSet = global_process_set) -> None:
    """Collective: warn where ranks have differently many batches, or all the same samples.

    Args:
        data: this rank's DataLoader, sampler, dataset or list.
        process_set: the ranks that are compared.
    """
    shards = allgather_object((len(data), _fingerprint(data)), "check_shards", process_set)
    lengths = [length for length, _ in shards]
    if len(set(lengths)) > 1:
        ranks = process_set.ranks or []
        shown = ", ".join(f"rank {rank} {length}" for rank, length in zip(ranks, lengths, strict=True))
        warnings.warn(
            f"ranks have different numbers of batches or samples: {shown}. Ranks with fewer must call join() at "
            "the end of an epoch, or give all the same number (DistributedSampler, drop_last=True)",
            stacklevel=2,
        )
    prints = {fingerprint for _, fingerprint in shards}
    if len(shards) > 1 and len(prints) == 1 and None not in prints:
        warnings.warn(
            "every rank goes through the same samples, so that they all compute the same: share the data out with "
            "DataLoader(dataset, sampler=hvd.DistributedSampler(dataset))",
            stacklevel=2,
        )


def _fingerprint(data: Any) -> bytes | None:
    """Equal for equal sets of samples; None where that can't be told."""
    if isinstance(data, DataLoader):
        data = data.dataset if data.sampler is None else data.sampler
    if isinstance(data, Sampler):
        with torch.random.fork_rng(devices=[]):
            indices = [index if isinstance(index, int) else -1 for index in data]
        return hashlib.blake2b(np.sort(np.array(indices, np.int64)).tobytes(), digest_size=16).digest()
    if hasattr(data, "indices"):
        return hashlib.blake2b(np.sort(np.array(data.indices, np.int64)).tobytes(), digest_size=16).digest()
    try:
        return hashlib.blake2b(pickle.dumps([data[i] for i in range(min(4, len(data)))]), digest_size=16).digest()
    except Exception:  # noqa: BLE001  (a dataset may refuse anything)
        return None
