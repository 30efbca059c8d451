"""Every operation of the named lane: what a rank asks for, the schedule that does it, what comes back.

One class per kind. An operation is made by the caller, which raises where this rank can't take part (later the others
would wait for it), agreed on through its ``Signature``, then asked for its schedule with all ranks' signatures at hand
(a gathered array's rows are known only then), and at last for its result. For a rank that has called ``join()``,
``stand_in`` makes the operation that contributes nothing.
"""

from __future__ import annotations

from horo_lite.engine.operations.absent import stand_in
from horo_lite.engine.operations.allreduce import AllReduce
from horo_lite.engine.operations.base import Barrier, Join, Operation, Refusal, new_tensor
from horo_lite.engine.operations.moving import AllGather, AllToAll, Broadcast
from horo_lite.engine.operations.reducescatter import ReduceScatter

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Barrier",
    "Broadcast",
    "Join",
    "Operation",
    "ReduceScatter",
    "Refusal",
    "new_tensor",
    "stand_in",
]
