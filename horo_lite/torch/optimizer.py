"""``DistributedOptimizer``: what the user's arguments mean."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from horo_lite.arrays import to_torch
from horo_lite.compression import Compression, is_compression, resolve
from horo_lite.context import current
from horo_lite.errors import ArgumentError, ArgumentTypeError
from horo_lite.functions import Adasum, Average, Sum, reduction_of
from horo_lite.interfaces import Reduction
from horo_lite.process_sets import ProcessSet, global_process_set
from horo_lite.torch.adasum import AdasumExchange
from horo_lite.torch.gradients import GradientExchange
from horo_lite.torch.names import Naming
from horo_lite.torch.settings import Settings
from horo_lite.torch.wrapper import check_passes, wrap


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Reduction = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    average_over_passes: bool = False,
    clip_norm: float | None = None,
    bucket_bytes: int | None = None,
    overlap: bool | str = "auto",
) -> Any:
    """Make an optimizer average its gradients over all ranks; collective over the process set.

    The optimizer itself is changed and returned: its class becomes a subclass of its class. When the last
    ``backward()`` before a step returns, ``.grad`` of every parameter is reduced on all ranks.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        named_parameters: ``model.named_parameters()``; it must cover the optimizer's parameters. Names appear in
            messages and must agree over ranks.
        compression: what goes on the wire, of ``hvd.Compression`` or your own.
        backward_passes_per_step: gradients of so many backward passes are added up before they are reduced. A
            ``step()`` before that reduces what there is.
        op: Average, Sum, or Adasum, which combines the optimizers' steps and not the gradients.
        gradient_predivide_factor: with Average, gradients are divided by it before they are added, and by the rest
            of the number of ranks after that.
        num_groups: deprecated, use ``groups``.
        groups: a number of groups, or lists of parameters, that are reduced as one unit each.
        sparse_as_dense: reduce sparse gradients as dense ones; else their rows are gathered.
        process_set: the ranks that take part; elsewhere the optimizer trains by itself.
        average_over_passes: divide by the number of backward passes as well.
        clip_norm: clip the global norm of the reduced gradients to this in every step.
        bucket_bytes: about how many bytes are reduced at a time.
        overlap: reduce while backward goes on: "auto" (where it pays), True, or False, which reduces at ``step()``
            or ``synchronize()`` only and so honours changes that are made to ``.grad`` before.

    Returns:
        The optimizer, with ``synchronize()``, ``skip_synchronize()`` and ``set_backward_passes_per_step(n)``.

    Raises:
        ValueError, TypeError: wrong arguments.
        DisagreementError: ranks have different parameters or arguments; on every rank, with the first difference.
    """
    current()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    op = reduction_of(None, op)
    if op not in (Average, Sum, Adasum):
        raise ArgumentError(f"DistributedOptimizer has op=Average, Sum and Adasum, got {op.name.title()}")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ArgumentError("gradient_predivide_factor not supported with op != Average")
    _check_positive("gradient_predivide_factor", gradient_predivide_factor)
    if clip_norm is not None and clip_norm != math.inf:
        _check_positive("clip_norm", clip_norm)
    if not isinstance(process_set, ProcessSet):
        raise ArgumentTypeError(f"process_set={process_set!r}: expected what hvd.add_process_set() returned")
    if num_groups:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed", DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    settings = Settings(
        naming=Naming(named_parameters, optimizer),
        compression=_compressor(compression),
        passes=check_passes(backward_passes_per_step),
        op=op,
        predivide=float(gradient_predivide_factor),
        groups=_checked_groups(groups),
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        average_over_passes=average_over_passes,
        clip_norm=clip_norm,
        bucket_bytes=bucket_bytes,
        overlap=_checked_overlap(overlap),
    )
    return wrap(optimizer, settings, AdasumExchange if op == Adasum else GradientExchange)


def _check_positive(keyword: str, value: Any) -> None:
    if not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise ArgumentError(f"{keyword}={value!r}: expected a number above 0")


def _compressor(compression: Any) -> Any:
    if compression is None or compression is Compression.none:
        return None
    if not is_compression(compression):
        raise ArgumentTypeError(
            f"compression is {compression!r}; expected one of hvd.Compression, as in compression=hvd.Compression.fp16"
        )
    return resolve(compression, to_torch)


def _checked_groups(groups: Any) -> Any:
    if groups is None or groups == 0:
        return None
    if isinstance(groups, int) and groups > 0:
        return groups
    if isinstance(groups, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in groups):
        tensors = [tensor for group in groups for tensor in group]
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise ArgumentError("groups must consist of torch.Tensor")
        if len({id(tensor) for tensor in tensors}) != len(tensors):
            raise ArgumentError("a parameter can only appear once in groups")
        return groups
    raise ArgumentError("groups should be a non-negative integer or a list of list of torch.Tensor")


def _checked_overlap(overlap: Any) -> bool | str:
    known: dict[Any, bool | str] = {"auto": "auto", "on": True, True: True, "off": False, False: False}
    if overlap not in known:
        raise ArgumentError(f'overlap={overlap!r}: expected "auto", True or False')
    return known[overlap]
