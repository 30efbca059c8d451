"""Making ranks equal: parameters, optimizer state and Python objects from one rank to all."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import cloudpickle
import torch

from horo_lite.context import current
from horo_lite.errors import ArgumentError, ArgumentTypeError
from horo_lite.functions import (
    allgather_object,
    broadcast_async_,
    broadcast_object,
    synchronize,
)
from horo_lite.process_sets import ProcessSet, global_process_set
from horo_lite.torch.agreement import agree_on_tensors
from horo_lite.torch.compressor_states import RANK_OWN

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(
    params: Any, root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Give every rank the root's parameters and buffers, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, any mapping or iterable of (name, tensor), or
            the model itself. Values that are no tensors are replaced in a mapping, and left alone elsewhere.
        root_rank: a global rank.
        process_set: the ranks that take part.

    Raises:
        DisagreementError: ranks passed different names, shapes or types; on every rank, with the first difference.
        ValueError: not such a collection.
    """
    entries = _entries(params)
    tensors = [(name, value) for name, value in entries if isinstance(value, torch.Tensor)]
    agree_on_tensors("broadcast_parameters", tensors, process_set)
    with torch.no_grad():
        handles = [
            broadcast_async_(tensor, root_rank, f"broadcast_parameters.{index}.{name}", process_set)
            for index, (name, tensor) in enumerate(tensors)
        ]
    for handle in handles:
        synchronize(handle)
    if isinstance(params, MutableMapping) and len(tensors) < len(entries):
        others = {name: value for name, value in entries if not isinstance(value, torch.Tensor)}
        params.update(broadcast_object(others, root_rank, "broadcast_parameters.objects", process_set))


def _entries(params: Any) -> list[tuple[str, Any]]:
    if isinstance(params, torch.nn.Module):
        params = params.state_dict()
    if isinstance(params, Mapping):
        return sorted(params.items(), key=lambda entry: str(entry[0]))
    if not isinstance(params, Iterable) or isinstance(params, torch.Tensor):
        raise ArgumentError(
            f"broadcast_parameters of {type(params).__name__}: expected model.state_dict(), "
            "model.named_parameters(), a mapping or an iterable of (name, tensor), or the model"
        )
    entries = []
    for index, entry in enumerate(params):
        if isinstance(entry, torch.Tensor):
            entry = (str(index), entry)
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ArgumentError(
                f"broadcast_parameters: expected pairs of (name, tensor), got {type(entry).__name__} "
                f"at position {index}"
            )
        entries.append(entry)
    return entries


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank the root's optimizer state and options (learning rate, ...).

    Works for any ``torch.optim.Optimizer``, and whatever has or has no state yet: the root's state is copied as it
    is, types included, and no step is made. What a compressor keeps per rank (its residuals) stays.

    Args:
        optimizer: wrapped or not.
        root_rank: a global rank.
        model: not needed; accepted as in Horovod.
        process_set: the ranks that take part.

    Raises:
        DisagreementError: ranks have different parameters; on every rank.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
    agree_on_tensors("broadcast_optimizer_state", named, process_set)
    numbers = {id(parameter): index for index, parameter in enumerate(parameters)}
    is_root = current().rank == root_rank
    mine: Any = None
    tensors: list[torch.Tensor] = []
    if is_root:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        state = {
            numbers.get(id(key), key): _without_rank_own(value) for key, value in optimizer.state.items()
        }
        mine = _pack((groups, state), tensors)
    packed = broadcast_object(mine, root_rank, "broadcast_optimizer_state", process_set)
    if not is_root:
        groups, state = _unpack(packed, tensors, parameters)
    handles = [
        broadcast_async_(tensor, root_rank, f"broadcast_optimizer_state.{index}", process_set)
        for index, tensor in enumerate(tensors)
    ]
    for handle in handles:
        synchronize(handle)
    if not is_root:
        _install(optimizer, parameters, groups, state)


def _without_rank_own(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    return {key: value for key, value in state.items() if key not in RANK_OWN}


def _install(optimizer: Any, parameters: list[Any], groups: list[Any], state: dict[Any, Any]) -> None:
    """In place, since schedulers hold the group dictionaries."""
    for own, sent in zip(optimizer.param_groups, groups, strict=True):
        for key in own.keys() - sent.keys() - {"params"}:
            del own[key]
        own.update(sent)
    kept = {
        index: {key: value for key, value in optimizer.state[p].items() if key in RANK_OWN}
        for index, p in enumerate(parameters)
        if p in optimizer.state
    }
    optimizer.state.clear()
    for key, value in state.items():
        is_number = isinstance(key, int)
        if is_number and kept.get(key):
            value = {**value, **kept[key]}
        optimizer.state[parameters[key] if is_number else key] = value


class _Pickler(cloudpickle.Pickler):
    """Leaves tensors out, wherever they are nested, and lists them."""

    def __init__(self, file: Any, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> Any:
        """A tensor is described by its shape, type, kind of device and the parameter it may lie beside."""
        if not isinstance(obj, torch.Tensor):
            return None
        self._tensors.append(obj.detach())
        return tuple(obj.shape), str(obj.dtype).removeprefix("torch."), obj.device.type


class _Unpickler(pickle.Unpickler):
    """Makes an empty tensor of each that was left out, and lists them."""

    def __init__(self, file: Any, tensors: list[torch.Tensor], device: torch.device) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._device = device

    def persistent_load(self, pid: Any) -> Any:
        """A tensor on the parameters' device where the root's was on a device of that kind."""
        shape, dtype, kind = pid
        device = self._device if kind == self._device.type else torch.device(kind)
        self._tensors.append(torch.empty(shape, dtype=getattr(torch, dtype), device=device))
        return self._tensors[-1]


def _pack(value: Any, tensors: list[torch.Tensor]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, tensors).dump(value)
    return file.getvalue()


def _unpack(packed: bytes, tensors: list[torch.Tensor], parameters: list[Any]) -> Any:
    device = parameters[0].device if parameters else torch.device("cpu")
    return _Unpickler(io.BytesIO(packed), tensors, device).load()
