"""The collectives on torch tensors: the framework-free ones with gradients, Horovod's signatures and torch results.

A call whose inputs need no gradient goes straight to ``horo_lite.functions``. Otherwise it becomes one node of the
autograd graph, whose backward is a collective as well; docs/torch.md has the table of backward rules. In-place and
asynchronous forms have no gradient, as in Horovod.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from horo_lite import functions
from horo_lite.arrays import to_torch
from horo_lite.compression import Compression, resolve
from horo_lite.context import current
from horo_lite.errors import ArgumentError
from horo_lite.functions import Average, Sum
from horo_lite.interfaces import Reduction
from horo_lite.process_sets import ProcessSet, global_process_set
from horo_lite.torch.handles import Follow

Tensors: TypeAlias = Sequence[torch.Tensor]
Body: TypeAlias = Callable[[Tensors], list[Any]]

# --- Gradients -------------------------------------------------------------------------------------------------------


class _Collective(torch.autograd.Function):
    """A collective as a node of the graph: ``run`` is the forward, ``gradient`` the backward, on lists of tensors."""

    @staticmethod
    def forward(ctx: Any, run: Body, gradient: Body, *tensors: torch.Tensor) -> Any:
        ctx.gradient = gradient
        outputs = tuple(run(tensors))
        ctx.mark_non_differentiable(*[out for out in outputs if not _may_require_grad(out)])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (None, None, *ctx.gradient(gradients))


def _differentiable(run: Body, gradient: Body, tensors: Tensors) -> list[Any]:
    """``run(tensors)``, as a node of the graph where one of them needs a gradient."""
    tensors = tuple(tensors)  # a generator can be read once
    return list(_Collective.apply(run, gradient, *tensors)) if _needs_grad(tensors) else run(tensors)


def _may_require_grad(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _needs_grad(tensors: Tensors) -> bool:
    return torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)


def _backward_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.backward"


def _wire(compression: Any) -> Any:
    """None for Horovod's default, so that an ordinary call compresses nothing; else what works on torch tensors."""
    return None if compression is None or compression is Compression.none else resolve(compression, to_torch)


# --- All-reduce ------------------------------------------------------------------------------------------------------


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a tensor over all ranks; differentiable. See ``horo_lite.allreduce``.

    Backward: the gradient goes through the same all-reduce.
    """
    wire = _wire(compression)
    if not _needs_grad((tensor,)):  # the small call is to pass through nothing more
        return functions.allreduce(
            tensor, average, name, wire, op, prescale_factor, postscale_factor, process_set
        )

    def run(tensors: Tensors) -> list[Any]:
        return [
            functions.allreduce(
                tensors[0], average, name, wire, op, prescale_factor, postscale_factor, process_set
            )
        ]

    def gradient(gradients: Tensors) -> list[Any]:
        return [
            allreduce(
                gradients[0], average, _backward_name(name), compression, op, prescale_factor,
                postscale_factor, process_set,
            )
        ]

    return _differentiable(run, gradient, (tensor,))[0]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduce several tensors as one unit; differentiable. See ``horo_lite.grouped_allreduce``.

    Backward: the gradients go through the same grouped all-reduce.
    """
    wire = _wire(compression)

    def run(tensors: Tensors) -> list[Any]:
        return functions.grouped_allreduce(
            tensors, average, name, wire, op, prescale_factor, postscale_factor, process_set
        )

    def gradient(gradients: Tensors) -> list[Any]:
        return grouped_allreduce(
            gradients, average, _backward_name(name), compression, op, prescale_factor, postscale_factor,
            process_set,
        )

    return _differentiable(run, gradient, tensors)


# --- Gather, broadcast, all-to-all, reduce-scatter -------------------------------------------------------------------


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate every rank's tensor along the first dimension; differentiable. See ``horo_lite.allgather``.

    Backward: the Average over ranks of the gradient of this rank's rows.
    """
    if not _needs_grad((tensor,)):
        return functions.allgather(tensor, name, process_set)
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gather several tensors as one unit; differentiable. See ``allgather``."""
    tensors = tuple(tensors)
    if not _needs_grad(tensors):
        return functions.grouped_allgather(tensors, name, process_set)
    shapes = [tuple(t.shape) for t in tensors]

    def gradient(gradients: Tensors) -> list[Any]:
        label = _backward_name(name)
        own = torch.tensor([shape[0] if shape else 1 for shape in shapes])
        rows = functions.allgather(own, label and f"{label}.rows", process_set).view(-1, len(shapes))
        starts = rows[: process_set.rank()].sum(0).tolist()
        averaged = grouped_allreduce(gradients, name=label, op=Average, process_set=process_set)
        return [
            whole.narrow(0, start, shape[0] if shape else 1).view(shape)
            for whole, start, shape in zip(averaged, starts, shapes, strict=True)
        ]

    def run(tensors: Tensors) -> list[Any]:
        return functions.grouped_allgather(tensors, name, process_set)

    return _differentiable(run, gradient, tensors)


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Give every rank the root's tensor; differentiable. See ``horo_lite.broadcast``.

    Backward: on the root the Average over ranks of the gradient, zero elsewhere.
    """

    def run(tensors: Tensors) -> list[Any]:
        return [functions.broadcast(tensors[0], root_rank, name, process_set)]

    def gradient(gradients: Tensors) -> list[Any]:
        averaged = allreduce(gradients[0], name=_backward_name(name), op=Average, process_set=process_set)
        return [averaged if current().rank == root_rank else averaged * 0]

    return _differentiable(run, gradient, (tensor,))[0]


def alltoall_async(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Follow:
    """Start an all-to-all; its result is always (tensor, received splits). See ``alltoall``."""
    handle = functions.alltoall_async(tensor, _on_host(splits), name, process_set)
    return Follow([handle], lambda result: (result[0], torch.tensor(result[1], dtype=torch.int32)))


def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send slices of the first dimension to every rank; differentiable. See ``horo_lite.alltoall``.

    Backward: the all-to-all that sends every slice of the gradient back.

    Returns:
        The received tensor; with ``splits``, a pair of it and the rows received from each rank (int32).
    """
    if not _needs_grad((tensor,)):
        received = functions.alltoall(tensor, _on_host(splits), name, process_set)
        return received if splits is None else (received[0], torch.from_numpy(received[1]))
    counts: list[torch.Tensor] = []

    def run(tensors: Tensors) -> list[Any]:
        output, rows = alltoall_async(tensors[0], splits, name, process_set)()
        counts.append(rows)
        return [output]

    def gradient(gradients: Tensors) -> list[Any]:
        return [alltoall(gradients[0], counts[0], _backward_name(name), process_set)[0]]

    output = _differentiable(run, gradient, (tensor,))[0]
    return output if splits is None else (output, counts[0])


def _on_host(splits: Any) -> Any:
    return splits.cpu() if isinstance(splits, torch.Tensor) else splits


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Reduction = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce, and leave each rank its rows; differentiable. See ``horo_lite.reducescatter``.

    Backward: all-gather of the gradient, times the number of ranks for Sum, times the scale factors.
    """
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Reduction = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce-scatter several tensors as one unit; differentiable. See ``reducescatter``.

    Args:
        compression: a cast (``Compression.fp16``) or a class with static ``compress`` and ``decompress``.
    """
    if not callable(getattr(compression, "compress", None)):
        raise ArgumentError(
            f"reducescatter takes a compression with static compress and decompress, such as "
            f"Compression.fp16; got {compression!r}"
        )

    def run(tensors: Tensors) -> list[Any]:
        packed = [compression.compress(t) for t in tensors]
        reduced = functions.grouped_reducescatter(
            [values for values, _ in packed], name, op, process_set, prescale_factor, postscale_factor
        )
        return [compression.decompress(t, ctx) for t, (_, ctx) in zip(reduced, packed, strict=True)]

    def gradient(gradients: Tensors) -> list[Any]:
        scale = prescale_factor * postscale_factor * (process_set.size() if op == Sum else 1)
        scaled = [g if scale == 1 else g * scale for g in gradients]
        return grouped_allgather(scaled, _backward_name(name), process_set)

    return _differentiable(run, gradient, tensors)
