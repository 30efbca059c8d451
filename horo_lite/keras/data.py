"""Each rank's part of the data, and warnings where parts do not fit together.

Ranks that have different numbers of batches end an epoch at different times: those that go on wait for those that
have stopped. Ranks that read the same data do the same work twice.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import keras
import numpy as np

from horo_lite import functions
from horo_lite.context import rank, size
from horo_lite.errors import ArgumentTypeError

_log = logging.getLogger("horo_lite")


class ShardedPyDataset(keras.utils.PyDataset):
    """Every N-th batch of a ``keras.utils.PyDataset`` (or ``Sequence``), beginning with this rank's.

    Left-over batches are dropped, so that all ranks have equally many.

    Args:
        dataset: the whole data set; its batches are the same on every rank.
    """

    def __init__(self, dataset: Any, **kwargs: Any) -> None:
        super().__init__(
            workers=getattr(dataset, "workers", 1),
            use_multiprocessing=getattr(dataset, "use_multiprocessing", False),
            max_queue_size=getattr(dataset, "max_queue_size", 10),
            **kwargs,
        )
        self.dataset = dataset
        self._rank, self._size = rank(), size()

    def __len__(self) -> int:
        return len(self.dataset) // self._size

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index * self._size + self._rank]

    def on_epoch_begin(self) -> None:
        if hasattr(self.dataset, "on_epoch_begin"):
            self.dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        if hasattr(self.dataset, "on_epoch_end"):
            self.dataset.on_epoch_end()


def shard(dataset: Any, *, equal: bool = True) -> Any:
    """This rank's part of a data set. Call it before ``batch`` for elements, after it for batches.

    Args:
        dataset: a ``tf.data.Dataset`` or a ``keras.utils.PyDataset``, the same on every rank: shuffle it with a seed
            that all ranks share, or afterwards.
        equal: drop elements at the end so that all ranks have equally many (where their number is known).

    Returns:
        A data set of the same kind.
    """
    if isinstance(dataset, keras.utils.PyDataset):
        return ShardedPyDataset(dataset)
    if callable(getattr(dataset, "shard", None)) and callable(getattr(dataset, "cardinality", None)):
        total = int(dataset.cardinality())
        part = dataset.shard(size(), rank())
        return part.take(total // size()) if equal and total >= 0 else part
    raise ArgumentTypeError(
        f"expected a tf.data.Dataset or a keras.utils.PyDataset, got {type(dataset).__name__}; of arrays take every "
        "N-th row: x[hvd.rank()::hvd.size()]"
    )


def check_shards(dataset: Any) -> bool:
    """Collective: warn where ranks' data differ in length, or where two ranks begin with the same batch.

    Returns:
        True when nothing was found.
    """
    own = (_length(dataset), _digest(_first(dataset)))
    everyone = functions.allgather_object(own, "check_shards")
    lengths = [length for length, _ in everyone]
    digests = [digest for _, digest in everyone]
    if len(set(lengths)) > 1:
        _log.warning(
            "ranks have different numbers of batches: %s. Those that have more will wait for the others: give all "
            "equally many (hvd.data.shard does), pass steps_per_epoch to fit(), or end with hvd.join()",
            ", ".join(f"rank {r} {'unknown' if n < 0 else n}" for r, n in enumerate(lengths)),
        )
    twins = [r for r, digest in enumerate(digests) if digest and digests.index(digest) < r]
    if twins:
        _log.warning(
            "rank %d begins with the same batch as rank %d: if the data is not sharded, every rank trains on all of "
            "it. Use hvd.data.shard(dataset), or shuffle with a seed that depends on the rank",
            twins[0], digests.index(digests[twins[0]]),
        )
    return len(set(lengths)) == 1 and not twins


def _length(dataset: Any) -> int:
    if callable(getattr(dataset, "cardinality", None)):
        return int(dataset.cardinality())
    return len(dataset) if hasattr(dataset, "__len__") else -1


def _first(dataset: Any) -> Any:
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return dataset[0] if len(dataset) else None
    return next(iter(dataset), None)


def _digest(batch: Any) -> bytes:
    if batch is None:
        return b""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in keras.tree.flatten(batch):
        if leaf is not None:
            digest.update(np.ascontiguousarray(np.asarray(leaf)).tobytes())
    return digest.digest()
