"""Checkpoints that rank 0 writes, that no crash leaves half written, and that resume at any number of ranks.

A file holds what is the same on all ranks once, and what a compressor keeps per rank for each rank. It is read with
``weights_only``, so a file from elsewhere runs no code.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from horo_lite.context import current
from horo_lite.errors import ArgumentError, HorovodInternalError
from horo_lite.functions import allgather_object, barrier, broadcast_object
from horo_lite.torch.compressor_states import RANK_OWN
from horo_lite.torch.functions import broadcast_optimizer_state, broadcast_parameters

_FORMAT = 1


def save_checkpoint(
    path: str | os.PathLike[str],
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **extra: Any,
) -> None:
    """Collective: write a checkpoint on rank 0, in one piece or not at all; all ranks return once it is there.

    Args:
        path: where rank 0 writes; folders are made.
        model: its ``state_dict()`` is written, from rank 0.
        optimizer: its state is written, from rank 0; what a compressor keeps per rank, from every rank.
        extra: tensors, numbers, strings, and dictionaries, lists and tuples of these (``scheduler.state_dict()``,
            the epoch), from rank 0.

    Raises:
        HorovodInternalError: rank 0 could not write; on every rank.
    """
    own = _rank_own(optimizer)
    rank_states = allgather_object(own, "save_checkpoint") if _anywhere(own) else []
    fault = None
    if current().rank == 0:
        content = {
            "format": _FORMAT,
            "model": None if model is None else model.state_dict(),
            "optimizer": None if optimizer is None else _shared(optimizer.state_dict()),
            "rank_states": rank_states,
            "extra": extra,
        }
        try:
            _write(Path(path), content)
        except Exception as error:  # noqa: BLE001  (told to all ranks, which raise)
            fault = f"{type(error).__name__}: {error}"
    _raise_everywhere(f"save_checkpoint({os.fspath(path)!r})", fault)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Collective: read a checkpoint on rank 0 and give it to all ranks, of which there may be more or fewer now.

    At another number of ranks, what a compressor kept per rank becomes the mean over the former ranks.

    Args:
        path: where rank 0 reads.
        model: it receives the model's state; None leaves it unread.
        optimizer: wrapped or not, it receives the optimizer's state; None leaves it unread.

    Returns:
        ``extra`` as it was saved.

    Raises:
        HorovodInternalError: rank 0 could not read; on every rank.
    """
    fault, content = None, {}
    if current().rank == 0:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            if not isinstance(content, dict) or content.get("format") != _FORMAT:
                raise ArgumentError("this file was not written by save_checkpoint")
            _check_holds(content, model=model, optimizer=optimizer)
            if model is not None:
                model.load_state_dict(content["model"])
            if optimizer is not None:
                optimizer.load_state_dict(content["optimizer"])
        except Exception as error:  # noqa: BLE001  (told to all ranks, which raise)
            fault = f"{type(error).__name__}: {error}"
    _raise_everywhere(f"load_checkpoint({os.fspath(path)!r})", fault)
    if model is not None:
        broadcast_parameters(model.state_dict(), root_rank=0)
    if optimizer is not None:
        broadcast_optimizer_state(optimizer, root_rank=0)
        rank_states = broadcast_object(content.get("rank_states"), name="load_checkpoint.rank_states")
        _give_rank_own(optimizer, rank_states)
    extra: dict[str, Any] = broadcast_object(content.get("extra"), name="load_checkpoint.extra")
    return extra


def _check_holds(content: dict[str, Any], **wanted: Any) -> None:
    missing = [kind for kind, target in wanted.items() if target is not None and content[kind] is None]
    if missing:
        raise ArgumentError(
            f"this file was saved without {' and '.join(missing)}; leave {' and '.join(missing)} out here as well"
        )


def _write(path: Path, content: Any) -> None:
    """A file of its own beside the target, moved over it at the end: readers see the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        torch.load(name, map_location="meta", weights_only=True)  # what cannot be read should fail now
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _raise_everywhere(what: str, fault: str | None) -> None:
    fault = broadcast_object(fault, name=what)
    if fault is not None:
        raise HorovodInternalError(f"{what} failed on rank 0: {fault}")
    barrier()


def _anywhere(own: dict[int, dict[str, Any]]) -> bool:
    return any(allgather_object(bool(own), "save_checkpoint.any"))


def _shared(state_dict: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state without what differs per rank."""
    state = {
        number: {key: value for key, value in values.items() if key not in RANK_OWN}
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": {number: values for number, values in state.items() if values}}


def _rank_own(optimizer: torch.optim.Optimizer | None) -> dict[int, dict[str, Any]]:
    """By number of parameter, what a compressor keeps on this rank alone."""
    states = {} if optimizer is None else optimizer.state_dict()["state"]
    own = {n: {key: value for key, value in state.items() if key in RANK_OWN} for n, state in states.items()}
    return {number: values for number, values in own.items() if values}


def _give_rank_own(optimizer: torch.optim.Optimizer, rank_states: list[dict[int, dict[str, Any]]]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        for key in RANK_OWN & set(optimizer.state.get(parameter, {})):
            del optimizer.state[parameter][key]
    if not rank_states:
        return
    same_size = len(rank_states) == current().size
    mine = rank_states[current().rank] if same_size else _mean(rank_states)
    for number, values in mine.items():
        own, device = optimizer.state[parameters[number]], parameters[number].device
        for key, value in values.items():
            own[key] = value.to(device, copy=True) if isinstance(value, torch.Tensor) else value


def _mean(rank_states: list[dict[int, dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """The mean over the former ranks, of residuals and velocities; chunks that depend on the number of ranks go."""
    mean: dict[int, dict[str, Any]] = {}
    for number in {number for states in rank_states for number in states}:
        for key in ("residual", "velocity"):
            arrays = [states[number][key] for states in rank_states if key in states.get(number, {})]
            if arrays:
                mean.setdefault(number, {})[key] = torch.stack(arrays).sum(0) / len(rank_states)
    return mean
