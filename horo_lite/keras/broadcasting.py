"""Keras variables from one rank to the others, on any backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horo_lite import functions
from horo_lite.exchange_options import check_same_variables, variable_path
from horo_lite.keras.backend import bridge
from horo_lite.process_sets import ProcessSet, global_process_set


def optimizer_variables(optimizer: Any) -> list[Any]:
    """An optimizer's variables, of Keras 3 or of legacy Keras; none of no optimizer."""
    found = getattr(optimizer, "variables", ())
    return list(found() if callable(found) else found)


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Give every rank the values of the root's variables.

    Raises:
        DisagreementError: ranks have different variables; on every rank, with the first that differs.
    """
    if not process_set.included():
        return
    variables = list(variables)
    arrays = [np.asarray(bridge().to_array(variable), order="C") for variable in variables]
    check_same_variables(
        [(variable_path(v), a.shape, a.dtype.name) for v, a in zip(variables, arrays, strict=True)],
        [bool(getattr(variable, "trainable", False)) for variable in variables],
        process_set,
    )
    handles = [
        functions.broadcast_async(array, root_rank, f"broadcast_variables.{index}", process_set)
        for index, array in enumerate(arrays)
    ]
    for variable, handle in zip(variables, handles, strict=True):
        variable.assign(functions.synchronize(handle))
