"""Saved models back into distributed ones."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import keras
from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group

from horo_lite import functions
from horo_lite.compression import Compression
from horo_lite.context import rank
from horo_lite.errors import ArgumentError, HorovodInternalError
from horo_lite.keras.compressor_states import States, as_arrays, read_model
from horo_lite.keras.cooperation import exchange_of
from horo_lite.keras.optimizer import DistributedOptimizer
from horo_lite.keras.wrapper import Distributed


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
        model, states = _load_from(root_rank, Path(filepath), known)
    else:
        if not Path(filepath).exists():
            raise ArgumentError(
                f"{filepath}: no such file on rank {rank()}. If only one rank has it, call load_model(..., "
                "root_rank=<that rank>) on all ranks"
            )
        model, states = _load(Path(filepath), known)
    _rewrap(model, compression, options)
    exchange = exchange_of(model.optimizer)
    if exchange is not None:
        exchange.restore(states)
    return model


def save_model(model: Any, filepath: str | os.PathLike[str], **options: Any) -> None:
    """Collective: rank 0 saves the model, with what compressors keep on every rank; all return once it is there.

    Without such compressors ``model.save`` on one rank does the same.

    Args:
        model: a Keras model.
        filepath: a ``.keras`` file.
        **options: as for ``model.save``.

    Raises:
        HorovodInternalError: rank 0 could not write; on every rank.
    """
    exchange = exchange_of(model.optimizer)
    everyone = functions.allgather_object({} if exchange is None else as_arrays(exchange.states), "save_model")
    fault = None
    if rank() == 0:
        if exchange is not None:
            exchange.gathered = dict(enumerate(everyone))
        try:
            model.save(filepath, **options)
        except Exception as error:  # noqa: BLE001  (told to all ranks, which raise)
            fault = f"{type(error).__name__}: {error}"
        finally:
            if exchange is not None:
                exchange.gathered = {}
    fault = functions.broadcast_object(fault, 0, "save_model.fault")
    if fault is not None:
        raise HorovodInternalError(f"save_model({os.fspath(filepath)!r}) failed on rank 0: {fault}")


def _load(path: Path, known: dict[str, Any]) -> tuple[Any, States]:
    legacy = _legacy_keras()
    if legacy is not None:
        return legacy.load_model(path, known), {}
    model = keras.models.load_model(path, custom_objects=known)
    optimizer = getattr(model, "optimizer", None)
    if h5py.is_hdf5(path) and optimizer is not None and optimizer.built and not optimizer._trainable_variables:
        model.optimizer = _optimizer_of_hdf5(path, optimizer, model.trainable_variables)
    return model, read_model(path)


def _legacy_keras() -> Any:
    """What serves legacy Keras, where that is ``tf.keras``; else None."""
    if "tf_keras" not in sys.modules:
        return None
    from horo_lite.tensorflow import legacy

    return legacy if legacy.is_in_use() else None


def _optimizer_of_hdf5(path: Path, loaded: Any, variables: Sequence[Any]) -> Any:
    """What Keras 3 leaves out for this format: it builds the optimizer for no variables at all, so that the model can't
    be trained, and has no place for its slots.
    """
    optimizer = type(loaded).from_config(loaded.get_config())
    optimizer.build(variables)
    with h5py.File(path, "r") as file:
        values = load_optimizer_weights_from_hdf5_group(file)
        for variable, value in zip(optimizer.variables, values, strict=True):
            variable.assign(value[()])
    return optimizer


def _load_from(root_rank: int, path: Path, known: dict[str, Any]) -> tuple[Any, States]:
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
        return _load(path, known)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        copy.write_bytes(content)
        return _load(copy, known)


def _rewrap(model: Any, compression: Any, options: dict[str, Any]) -> None:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return
    legacy = _legacy_keras()
    if legacy is not None:
        legacy.rewrap(model, {"compression": compression, **options})
        return
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        inner = optimizer.inner_optimizer
        if not isinstance(inner, Distributed):
            optimizer.inner_optimizer = DistributedOptimizer(inner, compression=compression, **options)
    elif not isinstance(optimizer, Distributed):
        model.optimizer = DistributedOptimizer(optimizer, compression=compression, **options)
    model.jit_compile = bool(model.jit_compile)  # resolved anew, now that the optimizer exchanges
    model.train_function = None


