"""What compressors keep from step to step (residuals and their like), in saved models.

It is a file beside the weights, ``assets/optimizer/compressor_states.npz`` within the ``.keras`` file, which Keras
passes over when it loads the model with a plain optimizer. It holds the state of the rank that saved, or of all ranks.
"""

from __future__ import annotations

import io
import logging
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from horo_lite.compression import RANK_OWN
from horo_lite.context import current

States = dict[str, dict[str, Any]]
"""By parameter's name, what a compressor keeps for it."""

_FILE = "compressor_states.npz"
_SIZE = "size"
_AVERAGED = ("residual", "velocity")
_log = logging.getLogger("horo_lite")


def as_arrays(states: Mapping[str, Mapping[str, Any]]) -> States:
    """The part that can be saved: arrays in host memory, and numbers."""
    found: States = {}
    for name, state in states.items():
        for key, value in state.items():
            array = np.array(value.cpu() if hasattr(value, "cpu") else value)
            if array.dtype.kind in "biuf":
                found.setdefault(name, {})[key] = array
    return found


def write(folder: Path, by_rank: Mapping[int, States], size: int) -> None:
    """Write the states of some of ``size`` ranks; no file where there are none."""
    entries: dict[str, Any] = {
        f"{rank}/{key}/{name}": array
        for rank, states in by_rank.items()
        for name, state in states.items()
        for key, array in state.items()
    }
    if entries:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / _FILE, **entries | {_SIZE: np.array(size)})


def read_folder(folder: Path) -> States:
    """This rank's states from the unpacked assets of a saved model."""
    return _of_this_rank((folder / _FILE).read_bytes()) if (folder / _FILE).exists() else {}


def read_model(path: Path) -> States:
    """This rank's states from a saved model."""
    if not zipfile.is_zipfile(path):  # Keras' HDF5 format has no place for them
        return {}
    with zipfile.ZipFile(path) as archive:
        files = [name for name in archive.namelist() if Path(name).name == _FILE]
        return _of_this_rank(archive.read(files[0])) if files else {}


def _of_this_rank(content: bytes) -> States:
    """With as many ranks as there were, a rank's own; else, or where it was not saved, what follows from all."""
    by_rank: dict[int, States] = {}
    with np.load(io.BytesIO(content)) as arrays:
        former_size = int(arrays[_SIZE])
        for entry in arrays.files:
            if entry != _SIZE:
                rank, key, name = entry.split("/", 2)
                value = arrays[entry]
                by_rank.setdefault(int(rank), {}).setdefault(name, {})[key] = value if value.ndim else value.item()
    context = current()
    if former_size == context.size and context.rank in by_rank:
        return by_rank[context.rank]
    if len(by_rank) < former_size:
        _log.info(
            "what compression had left unsent on rank %d begins anew: the model was saved by rank %s alone. "
            "hvd.save_model(model, path) saves what all %d ranks have",
            context.rank, ", ".join(map(str, by_rank)), former_size,
        )
    return _combined(by_rank, former_size)


def _combined(by_rank: Mapping[int, States], former_size: int) -> States:
    """What is the same on all ranks, and the mean of residuals where those of all former ranks are known."""
    combined: States = {}
    for states in by_rank.values():
        for name, state in states.items():
            combined.setdefault(name, {}).update({k: v for k, v in state.items() if k not in RANK_OWN})
    if len(by_rank) == former_size:
        for name, kept in combined.items():
            for key in _AVERAGED:
                arrays = [s[name][key] for s in by_rank.values() if key in s.get(name, {})]
                if arrays:
                    kept[key] = np.sum(arrays, axis=0, dtype=arrays[0].dtype) / arrays[0].dtype.type(former_size)
    return combined
