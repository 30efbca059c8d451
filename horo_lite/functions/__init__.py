"""The collectives on numpy arrays and torch tensors: one core, from which every front end's names are made.

Each call makes an operation (``engine.operations``) and hands it to the named lane of its process set. The asynchronous
forms return a ``Handle`` for ``synchronize`` and ``poll``; the others wait, in the caller's thread. A front end that
wants a form of its own passes what makes the operation (``make_allreduce``, ...) to ``call`` or ``start``.
"""

from __future__ import annotations

from horo_lite.functions.all_reduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    make_allreduce,
)
from horo_lite.functions.arguments import Adasum, Average, Max, Min, Product, Sum, reduction_of
from horo_lite.functions.joining import barrier, join
from horo_lite.functions.moving import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from horo_lite.functions.objects import allgather_object, broadcast_object
from horo_lite.functions.reduce_scatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from horo_lite.functions.submission import call, poll, start, synchronize

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "call",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "make_allreduce",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "reduction_of",
    "start",
    "synchronize",
]
