"""Do all ranks have the same tensors? Found out once, before anything is exchanged."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from horo_lite.errors import DisagreementError
from horo_lite.functions import allgather, allgather_object
from horo_lite.process_sets import ProcessSet

Described = tuple[str, tuple[int, ...], str]  # name, shape, element type


def describe(tensors: Sequence[tuple[str, Any]]) -> list[Described]:
    """What ranks compare of named tensors."""
    return [(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors]


def agree_on_tensors(what: str, tensors: Sequence[tuple[str, Any]], process_set: ProcessSet) -> None:
    """Collective: compare names, shapes and types over the process set; 16 bytes a rank where they are equal.

    Raises:
        DisagreementError: they differ; on every rank, with each rank's number of tensors and the first difference.
    """
    own = describe(tensors)
    digest = hashlib.blake2b(repr(own).encode(), digest_size=16).digest()
    digests = allgather(np.frombuffer(digest, np.uint8), f"{what}.digest", process_set)
    if len(np.unique(digests.reshape(-1, 16), axis=0)) > 1:
        lists = allgather_object(own, f"{what}.tensors", process_set)
        raise DisagreementError(difference(what, lists, process_set.ranks or []))


def difference(what: str, lists: Sequence[Sequence[Described]], ranks: Sequence[int]) -> str:
    """The text of the error, from every member's list."""
    counts = ", ".join(f"rank {rank}: {len(own)}" for rank, own in zip(ranks, lists, strict=True))
    for row in itertools.zip_longest(*lists):
        if len(set(row)) > 1:
            break
    name = next(entry[0] for entry in row if entry is not None)
    shown = "; ".join(
        f"rank {rank}: {'nothing' if entry is None else f'{entry[0]} {list(entry[1])} {entry[2]}'}"
        for rank, entry in zip(ranks, row, strict=True)
    )
    return (
        f"{what}: ranks have different tensors ({counts}); first difference: {name} ({shown}). "
        "Every rank must build the same model"
    )
