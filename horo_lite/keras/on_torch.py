"""Keras on torch. See ``backend.Bridge``."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import keras
import numpy as np
import torch

from horo_lite import functions
from horo_lite.arrays import flat, is_torch, to_torch
from horo_lite.compression import resolve
from horo_lite.context import current
from horo_lite.exchange_options import ExchangeOptions, stable_names, variable_path
from horo_lite.functions import Min

graph_errors = ()


def native(variable: Any) -> Any:
    """The ``torch.nn.Parameter``."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def compression(compression: Any) -> Any:
    """A user's own compressor sees torch's tensors."""
    return None if compression is None else resolve(compression, to_torch)


class TorchReducer:
    """Reduces torch gradients through the buckets.

    Args:
        share: results may be views of the buckets.
    """

    def __init__(self, options: ExchangeOptions, variables: Sequence[Any], share: bool) -> None:
        self.context = current()
        self._share = share
        own = [native(variable) for variable in variables]
        names = stable_names([variable_path(variable) for variable in variables])
        self._shapes = [tuple(tensor.shape) for tensor in own]
        self._buckets = options.buckets(
            [
                (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                for name, tensor in zip(names, own, strict=True)
            ],
            own,
            str(own[0].device),
        )

    @property
    def states(self) -> dict[str, MutableMapping[str, Any]]:
        """By parameter's name, what a compressor keeps from step to step."""
        return self._buckets.states

    @torch.no_grad()
    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """See ``backend.Reducer``."""
        views = self._buckets.views
        for index in reversed(range(len(views))):
            if gradients[index] is not None:
                views[index][:] = flat(gradients[index].detach().to_dense())
                self._buckets.ready(index)
        return [
            self._result(index) if used else None for index, used in enumerate(self._buckets.finish())
        ]

    def _result(self, index: int) -> Any:
        view = self._buckets.views[index]
        tensor = (view if is_torch(view) else to_torch(view)).view(self._shapes[index])
        return tensor if self._share else tensor.clone()


def make_reducer(
    options: ExchangeOptions, variables: Sequence[Any], gradients: Sequence[Any], share: bool
) -> TorchReducer:
    """The buckets of these variables; names are their paths in the model."""
    return TorchReducer(options, variables, share)


def dense(gradient: Any) -> Any:
    """A sparse tensor as a dense one."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def all_true(flag: Any, options: ExchangeOptions, name: str) -> Any:
    """The minimum over ranks."""
    number = functions.allreduce(
        np.array(bool(flag), np.uint8), op=Min, name=name, process_set=options.process_set
    )
    return torch.tensor(bool(number))


def to_array(value: Any) -> Any:
    """The values, in host memory."""
    tensor = native(value)
    return tensor.detach().cpu().numpy() if is_torch(tensor) else np.asarray(tensor)
