"""Saved models back into distributed ones."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from horo_lite import functions
from horo_lite.compression import Compression
from horo_lite.context import rank
from horo_lite.errors import ArgumentError
from horo_lite.keras.optimizer import Distributed, DistributedOptimizer


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
    *,
    root_rank: int | None = None,
    **options: Any,
) -> Any:
    """Load a model, with its optimizer wrapped in ``DistributedOptimizer`` again and its state restored.

    A saved model holds the plain optimizer, so Keras alone can load it too, and at any number of ranks.

    Args:
        filepath: a ``.keras`` (or ``.h5``) file.
        custom_optimizers: optimizer classes of one's own that the model may have been saved with.
        custom_objects: as in ``keras.models.load_model``.
        compression: as for ``DistributedOptimizer``.
        legacy_opts: accepted for Horovod's sake.
        root_rank: only this rank has the file: it is sent to the others, all of which call this too. Without it each
            rank reads its own, so that one rank may load alone and broadcast the variables later.
        **options: further keywords for ``DistributedOptimizer``.

    Raises:
        ValueError: there is no such file, on this rank or on ``root_rank``.
    """
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    if root_rank is not None:
        model = _load_from(root_rank, Path(filepath), known)
    else:
        if not Path(filepath).exists():
            raise ArgumentError(
                f"{filepath}: no such file on rank {rank()}. If only one rank has it, call load_model(..., "
                "root_rank=<that rank>) on all ranks"
            )
        model = keras.models.load_model(filepath, custom_objects=known)
    _rewrap(model, compression, options)
    return model


def _load_from(root_rank: int, path: Path, known: dict[str, Any]) -> Any:
    """On every rank, the model of a file that the root has."""
    content: bytes | str = ""
    if rank() == root_rank:
        try:
            content = path.read_bytes()
        except OSError as error:
            content = str(error)
    content = functions.broadcast_object(content, root_rank, "load_model")
    if isinstance(content, str):
        raise ArgumentError(f"{path}: rank {root_rank} cannot read it: {content}")
    if rank() == root_rank:
        return keras.models.load_model(path, custom_objects=known)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        copy.write_bytes(content)
        return keras.models.load_model(copy, custom_objects=known)


def _rewrap(model: Any, compression: Any, options: dict[str, Any]) -> None:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        inner = optimizer.inner_optimizer
        if not isinstance(inner, Distributed):
            optimizer.inner_optimizer = DistributedOptimizer(inner, compression=compression, **options)
    elif not isinstance(optimizer, Distributed):
        model.optimizer = DistributedOptimizer(optimizer, compression=compression, **options)
    model.jit_compile = bool(model.jit_compile)  # resolved anew, now that the optimizer exchanges
    model.train_function = None


