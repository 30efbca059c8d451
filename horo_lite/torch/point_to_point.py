"""``send`` and ``recv``: a model cut over ranks, whose gradients find their way back.

Stage k sends its output and gets a token; stage k+1 receives it and goes on. ``token.backward()`` on the sender waits
for the gradient that the receiver's backward sends, and goes on with it into the sender's graph.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from horo_lite.arrays import Flat, as_bytes, type_name
from horo_lite.context import Context, current
from horo_lite.engine import Handle
from horo_lite.engine.point_to_point import Envelope, PointToPointLane
from horo_lite.errors import ArgumentError, NotInitializedError
from horo_lite.interfaces import Transport
from horo_lite.process_sets import global_process_set

_lanes: weakref.WeakKeyDictionary[Context, PointToPointLane] = weakref.WeakKeyDictionary()


def send(tensor: torch.Tensor, dst: int, tag: int = 0) -> torch.Tensor:
    """Send a tensor to a rank, which takes it with ``recv``; returns at once, and the tensor may change after that.

    Args:
        tensor: anything dense.
        dst: the global rank of the receiver.
        tag: keeps messages apart that ranks send and receive in different orders.

    Returns:
        A token. Where the tensor needs a gradient, ``token.backward()``, or ``torch.autograd.backward(tokens)`` for
        several, receives it from ``dst`` and goes on from there.
    """
    needs_grad = torch.is_grad_enabled() and tensor.requires_grad
    if needs_grad:
        return _Send.apply(tensor, dst, tag)
    _post(tensor, dst, 2 * tag, False)
    return torch.zeros((), device=tensor.device)


def recv(like: torch.Tensor, src: int, tag: int = 0) -> torch.Tensor:
    """Receive what a rank sends with ``send``; waits for it.

    Args:
        like: a tensor of the type, shape and device to expect; its values do not matter.
        src: the global rank of the sender.
        tag: as the sender's.

    Returns:
        A tensor. Where the sender waits for a gradient, it needs one, and its backward sends it to ``src``.

    Raises:
        DisagreementError: something else was sent; says what.
    """
    values, sent = _take(like, src, 2 * tag)
    if sent.differentiable and torch.is_grad_enabled():
        anchor = torch.zeros((), device=like.device, requires_grad=True)
        return _Recv.apply(values, anchor, src, tag)
    return values


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dst: int, tag: int) -> torch.Tensor:  # type: ignore[override]
        ctx.dst, ctx.tag, ctx.shape = dst, tag, tensor.shape
        _post(tensor, dst, 2 * tag, True)
        return torch.zeros((), dtype=tensor.dtype, device=tensor.device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient, _ = _take(gradients[0].new_empty(ctx.shape), ctx.dst, 2 * ctx.tag + 1)
        return gradient, None, None


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, values: torch.Tensor, anchor: torch.Tensor, src: int, tag: int
    ) -> torch.Tensor:
        ctx.src, ctx.tag = src, tag
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _post(gradients[0], ctx.src, 2 * ctx.tag + 1, False)
        return None, torch.zeros((), device=gradients[0].device), None, None


def _post(tensor: torch.Tensor, dst: int, tag: int, differentiable: bool) -> Handle:
    """Begin to send a copy; the engine finishes by itself."""
    lane = _lane(dst, tag, "dst")
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    envelope = Envelope(type_name(copy), tuple(copy.shape), differentiable)
    handle = lane.send(as_bytes(Flat(copy).buffer), envelope, dst, tag)
    current().engine.wake()
    return handle


def _take(like: torch.Tensor, src: int, tag: int) -> tuple[torch.Tensor, Envelope]:
    lane = _lane(src, tag, "src")
    values = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    envelope = Envelope(type_name(values), tuple(values.shape), False)
    sent = current().engine.wait(lane.recv(as_bytes(Flat(values, writable=True).buffer), envelope, src, tag))
    return values, sent


def _lane(peer: int, tag: int, argument: str) -> PointToPointLane:
    context = current()
    if not 0 <= peer < context.size or peer == context.rank:
        raise ArgumentError(
            f"{argument}={peer}: expected another rank than {context.rank}, from 0 to {context.size - 1}"
        )
    lane = _lanes.get(context)
    if lane is None:
        lane = _lanes[context] = PointToPointLane(_transport(), tuple(range(context.size)))
        context.engine.add(lane)
    if not 0 <= tag < lane.tags:
        raise ArgumentError(f"tag={tag // 2}: expected 0 to {lane.tags // 2 - 1}")
    return lane


def _transport() -> Transport:
    named = global_process_set.member().lane
    if named is None:
        raise NotInitializedError
    return named.transport
