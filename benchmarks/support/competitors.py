"""The all-reduces that are compared: this package's in several forms, the MPI library's, Gloo's.

Each works in place (but for ``NEW``), sums, and is checked on every rank before it is timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

OURS, NEW, RESIDENT, LIBRARY, GLOO = "allreduce_", "allreduce", "resident", "MPI", "Gloo"
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

Call = Callable[[], Any]
"""One all-reduce; returns the tensor that holds the result."""


class Competitors:
    """Makes each competitor's call for a number of elements of a type; None where it can't do that type."""

    def __init__(self, hvd: Any, comm: Any) -> None:
        self._hvd = hvd
        self._comm = comm
        self._buckets: list[Any] = []
        self.makers: dict[str, Callable[[int, str], tuple[Any, Call]]] = {
            OURS: self._in_place, NEW: self._new, RESIDENT: self._resident, LIBRARY: self._library,
        }
        if self._start_gloo():
            self.makers[GLOO] = self._gloo

    def calls(self, elements: int, kind: str) -> dict[str, Call]:
        """By name, those whose result is right on every rank."""
        found = {}
        for name, make in self.makers.items():
            try:
                tensor, call = make(elements, kind)
                right = self._is_right(tensor, call)
            except Exception:
                right = False
            if all(self._comm.allgather(right)):
                found[name] = call
        return found

    def close(self) -> None:
        """Give the shared memory of the present size back."""
        for buckets in self._buckets:
            buckets.close()
        self._buckets.clear()

    def finish(self) -> None:
        """End Gloo's connections, and remove what its start needed."""
        if GLOO in self.makers:
            import torch.distributed as dist

            dist.destroy_process_group()
            self._comm.Barrier()
            self._gloo_folder.cleanup()

    def _is_right(self, tensor: Any, call: Call) -> bool:
        size = self._comm.Get_size()
        tensor.fill_(self._comm.Get_rank() + 1)
        result = call()
        right = bool((result == size * (size + 1) / 2).all())
        tensor.zero_()  # so that summing it a thousand times leaves it alone
        return right

    def _in_place(self, elements: int, kind: str) -> tuple[Any, Call]:
        tensor = _tensor(elements, kind)
        return tensor, lambda: self._hvd.allreduce_(tensor, op=self._hvd.Sum)

    def _new(self, elements: int, kind: str) -> tuple[Any, Call]:
        tensor = _tensor(elements, kind)
        return tensor, lambda: self._hvd.allreduce(tensor, op=self._hvd.Sum)

    def _resident(self, elements: int, kind: str) -> tuple[Any, Call]:
        """A gradient that lives in its bucket, as a distributed optimizer has it."""
        from horo_lite.arrays import to_torch
        from horo_lite.gradients import GradientBuckets

        buckets = GradientBuckets([("gradient", (elements,), kind)], op=self._hvd.Sum, overlap=False)
        self._buckets.append(buckets)
        tensor = to_torch(buckets.views[0])

        def step() -> Any:
            buckets.ready(0)
            buckets.finish()
            return tensor

        return tensor, step

    def _library(self, elements: int, kind: str) -> tuple[Any, Call]:
        from mpi4py import MPI

        tensor = _tensor(elements, kind)
        array = tensor.numpy()  # bfloat16 has none: MPI has no such type either

        def call() -> Any:
            self._comm.Allreduce(MPI.IN_PLACE, array)
            return tensor

        return tensor, call

    def _start_gloo(self) -> bool:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_gloo_available()):
            return False
        self._gloo_folder = tempfile.TemporaryDirectory(prefix="gloo-")  # the first rank's is used, while it lives
        store = Path(self._comm.bcast(self._gloo_folder.name)) / "store"
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=self._comm.Get_rank(),
            world_size=self._comm.Get_size(),
        )
        return True

    def _gloo(self, elements: int, kind: str) -> tuple[Any, Call]:
        import torch.distributed as dist

        tensor = _tensor(elements, kind)

        def call() -> Any:
            dist.all_reduce(tensor)
            return tensor

        return tensor, call


class Schedules:
    """Each algorithm alone: its schedule on the MPI transport, without the engine and its agreement."""

    def __init__(self, comm: Any) -> None:
        from horo_lite.config import Config
        from horo_lite.transport.mpi_world import MPIWorld

        config = Config()
        world = MPIWorld(config, comm)
        self._transport = world.transport()
        self._nodes = world.topology.nodes
        self._segment_bytes = config.segment_bytes

    def calls(self, elements: int, kind: str) -> dict[str, Call]:
        """By algorithm, those that serve the type and need no memory shared beforehand."""
        import numpy as np

        from horo_lite.arrays import kernel, numpy_dtype
        from horo_lite.collectives import algorithms
        from horo_lite.interfaces import Group, Reduction
        from horo_lite.transport.driver import run

        transport = self._transport
        arithmetic = kernel(kind, Reduction.SUM, transport.size)
        group = Group.whole(transport.rank, transport.size)
        buffer = np.full(elements, 0, numpy_dtype(kind))
        context = {"nodes": self._nodes, "segment_elements": self._segment_bytes // ITEM_BYTES[kind]}
        return {
            name: lambda entry=entry: run(entry(group, buffer, arithmetic, **context), transport)
            for name, entry in algorithms("allreduce").items()
            if entry.needs <= context.keys()
            and (entry.wide or not arithmetic.wide)
            and name != "adasum"
        }


def _tensor(elements: int, kind: str) -> Any:
    import torch

    return torch.full((elements,), 0, dtype=getattr(torch, kind))
