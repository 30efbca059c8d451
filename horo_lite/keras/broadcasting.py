"""Keras variables from one rank to the others, on any backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horo_lite import functions
from horo_lite.context import ProcessSet, global_process_set
from horo_lite.errors import DisagreementError
from horo_lite.keras.backend import bridge


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Give every rank the values of the root's variables.

    Raises:
        DisagreementError: ranks have different variables; on every rank, with the first that differs.
    """
    if process_set.process_set_id != 0 and not process_set.included():
        return
    arrays = [np.asarray(bridge().to_array(variable), order="C") for variable in variables]
    _check_same(variables, arrays, process_set)
    handles = [
        functions.broadcast_async(array, root_rank, f"broadcast_variables.{index}", process_set)
        for index, array in enumerate(arrays)
    ]
    for variable, handle in zip(variables, handles, strict=True):
        variable.assign(functions.synchronize(handle))


def _check_same(variables: Sequence[Any], arrays: Sequence[Any], process_set: ProcessSet) -> None:
    own = [(array.shape, array.dtype.name) for array in arrays]
    everyone = functions.allgather_object(own, "broadcast_variables.names", process_set)
    for rank, other in zip(process_set.ranks or (), everyone, strict=False):
        if other == everyone[0]:
            continue
        place = next(
            (i for i, (a, b) in enumerate(zip(everyone[0], other, strict=False)) if a != b),
            min(len(everyone[0]), len(other)),
        )
        here, there = (
            listed[place] if place < len(listed) else "absent" for listed in (everyone[0], other)
        )
        name = str(getattr(variables[place], "path", "")) if place < len(variables) else "absent here"
        raise DisagreementError(
            f"ranks have different variables: rank {(process_set.ranks or [0])[0]} has {len(everyone[0])} and rank "
            f"{rank} has {len(other)}; the first difference is number {place} ({name}): {here} and {there}. "
            "Build the same model and optimizer on every rank"
        )
