"""What a compressor keeps for each parameter, as a part of the optimizer's state.

Residuals and their like belong into checkpoints, so they live in ``optimizer.state[p]`` beside ``exp_avg``, where
plain torch keeps and loads them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any

import numpy as np
import torch

from horo_lite.arrays import flat, to_torch
from horo_lite.compression import RANK_OWN, STATE_KEYS

__all__ = ["RANK_OWN", "ParameterState"]

_OTHERS = "compressor."
"""Put in front of keys that only a compressor of a user's own has, as the optimizer may have one of that name."""


class ParameterState(MutableMapping[str, Any]):
    """The view of ``optimizer.state[parameter]`` that a compressor is given: flat arrays and numbers, without the
    optimizer's own.

    An optimizer sees from an empty state that it has to make its own. So nothing is put there before its first step:
    ``settle`` moves what has gathered here.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._parameter = parameter
        self._early: dict[str, Any] = {}

    def _stored(self) -> dict[str, Any]:
        optimizer: Any = self._optimizer()
        return {} if optimizer is None else optimizer.state.get(self._parameter, {})

    def settle(self) -> None:
        """After a step that updated the parameter."""
        if self._early and self._parameter.grad is not None:
            optimizer: Any = self._optimizer()
            state = optimizer.state[self._parameter]
            for key, value in self._early.items():
                state.setdefault(_stored_as(key), _as_torch(value))
            self._early.clear()

    def __getitem__(self, key: str) -> Any:
        stored = self._stored()
        if _stored_as(key) in stored:
            value = stored[_stored_as(key)]
            return flat(value) if isinstance(value, torch.Tensor) else value
        return self._early[key]

    def __setitem__(self, key: str, value: Any) -> None:
        stored = self._stored()
        if stored:
            stored[_stored_as(key)] = _as_torch(value)
            self._early.pop(key, None)
        else:
            self._early[key] = value

    def __delitem__(self, key: str) -> None:
        if self._early.pop(key, None) is None:
            del self._stored()[_stored_as(key)]

    def __iter__(self) -> Iterator[str]:
        kept = (key.removeprefix(_OTHERS) for key in self._stored() if key in STATE_KEYS or key.startswith(_OTHERS))
        return iter({*self._early, *kept})

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _stored_as(key: str) -> str:
    return key if key in STATE_KEYS else _OTHERS + key


def _as_torch(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()  # a file that is read with weights_only has none of numpy's
    return to_torch(value) if isinstance(value, np.ndarray) else value
