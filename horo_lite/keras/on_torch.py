"""Keras on torch. See ``backend.Bridge``."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, cast

import keras
import numpy as np
import torch

from horo_lite import functions
from horo_lite.arrays import is_torch, to_torch
from horo_lite.compression import resolve
from horo_lite.exchange import BucketExchange
from horo_lite.exchange_options import ExchangeOptions, ParameterSpec
from horo_lite.functions import Min
from horo_lite.keras.backend import parameters

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
        self._share = share
        own = [native(variable) for variable in variables]
        self._parameters = parameters(variables)
        self._exchange = BucketExchange(options, self._parameters, own, str(own[0].device))

    @property
    def context(self) -> Any:
        """See ``backend.Reducer``."""
        return self._exchange.context

    @property
    def states(self) -> dict[str, MutableMapping[str, Any]]:
        """See ``backend.Reducer``."""
        return self._exchange.states

    @torch.no_grad()
    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """See ``backend.Reducer``."""
        own = [
            None if gradient is None else dense(gradient, type_name)
            for gradient, (_, _, type_name) in zip(gradients, self._parameters, strict=True)
        ]
        return [
            None if view is None else self._shaped(view, shape)
            for view, (_, shape, _) in zip(self._exchange.reduce(own), self._parameters, strict=True)
        ]

    def _shaped(self, view: Any, shape: tuple[int, ...]) -> Any:
        tensor = (view if is_torch(view) else to_torch(view)).view(shape)
        return tensor if self._share else tensor.clone()


def make_reducer(
    options: ExchangeOptions, variables: Sequence[Any], gradients: Sequence[Any], share: bool
) -> TorchReducer:
    """See ``TorchReducer``."""
    return TorchReducer(options, variables, share)


def dense(gradient: Any, type_name: str) -> Any:
    """Without its history."""
    own = gradient.detach()
    return (own.to_dense() if own.is_sparse else own).to(getattr(torch, type_name))


def on_host(
    function: Callable[[Sequence[Any]], Sequence[Any]], tensors: Sequence[Any], outputs: Sequence[ParameterSpec]
) -> list[Any]:
    """At once, and on the tensors themselves."""
    return [keras.ops.convert_to_tensor(value) for value in function(tensors)]


def when(condition: Any, action: Callable[[], None], variables: Sequence[Any]) -> None:
    """At once."""
    if condition:
        action()


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo would follow an exchange down to MPI."""
    return cast(Callable[..., Any], torch.compiler.disable(function))


def in_update(optimizer: Any, action: Callable[[], Any], otherwise: Any) -> Any:
    """Keras asks in the pass of an update only."""
    return action()


def settle() -> None:
    """A step has ended when its function returns."""


@torch.compiler.disable
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
