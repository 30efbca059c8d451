"""A sampler that knows which samples of an epoch have been used, so that an interrupted epoch goes on with the rest."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from horo_lite import context


class ElasticSampler(Sampler):
    """Shares out, over all ranks, what has not been processed yet.

    Args:
        dataset: anything with a length.
        shuffle: draw a new order each epoch.
        seed: of the order, the same on all ranks.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, at its end or before its first batch: nothing has been processed."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """The samples of this rank's batch number ``batch_idx`` have been processed."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Any) -> None:
        """These samples have been processed."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of this rank's batch number ``batch_idx``."""
        start = batch_idx * batch_size
        return self.indices[start : start + batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Epoch and processed samples."""
        return {"epoch": self.epoch, "processed_indices": self.processed_indices}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was made."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Share out anew what is left, over the ranks there are now."""
        self.num_replicas, self.rank = context.size(), context.rank()
        self.remaining_indices = [i for i in range(len(self.dataset)) if i not in self.processed_indices]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self.indices = self._draw()

    def _draw(self) -> list[int]:
        indices = list(self.remaining_indices)
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        while indices and len(indices) < self.total_size:  # every rank has as many
            indices += indices[: self.total_size - len(indices)]
        return indices[self.rank : self.total_size : self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
