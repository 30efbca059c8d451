"""Sparse tensors and gradients: exchanged as rows (indices and values), nothing is made dense."""

from __future__ import annotations

import torch

from horo_lite.errors import ArgumentError
from horo_lite.functions import Average, Sum, allgather_async, allgather_object
from horo_lite.interfaces import Reduction
from horo_lite.process_sets import ProcessSet, global_process_set
from horo_lite.torch.handles import Follow
from horo_lite.torch.settings import Settings
from horo_lite.torch.slots import Slot

_DENSE_ONLY = tuple(
    getattr(torch.optim, name)
    for name in (
        "Adadelta", "Adafactor", "Adam", "Adamax", "AdamW", "ASGD", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop",
    )
    if hasattr(torch.optim, name)
)  # these refuse sparse gradients


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: Reduction, process_set: ProcessSet = global_process_set
) -> Follow:
    """Start to reduce a sparse COO tensor: its indices and values are gathered, nothing is made dense.

    Args:
        tensor: shape and number of sparse dimensions must agree over ranks, the number of elements need not.
        name: what it is matched by.
        op: Average or Sum.
        process_set: the ranks that take part.

    Returns:
        A handle; calling it, or ``synchronize``, returns the coalesced sparse result.
    """
    if op not in (Average, Sum):
        raise ArgumentError(f"sparse all-reduce has Average and Sum, got {Reduction(op).name.title()}")
    own = tensor.detach().coalesce()
    handles = [
        allgather_async(own.indices().t().contiguous(), f"{name}.indices", process_set),
        allgather_async(own.values(), f"{name}.values", process_set),
    ]

    def finish(indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if op == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, own.size(), check_invariants=False).coalesce()

    return Follow(handles, finish)


class SparseGradients:
    """Which of an optimizer's gradients are sparse, and how those are exchanged.

    The first reduction takes all as dense ones, since a rank that had none could not know; then the ranks tell one
    another, and from then on the sparse ones go as rows. Only ``SparseAdam``'s are sparse from the start.

    Args:
        optimizer: it is not kept alive.
        settings: what the user asked for.

    Attributes:
        seen: by parameter's name, how many dimensions of a sparse gradient on this rank are sparse.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings) -> None:
        self._settings = settings
        self._taken_sparse = not isinstance(optimizer, _DENSE_ONLY)
        self._as_rows = self._taken_sparse and not settings.sparse_as_dense and settings.compression is None
        self.seen: dict[str, int] = {}
        self._dims: dict[str, int] | None = None  # as seen on any rank; None until they have agreed
        if isinstance(optimizer, torch.optim.SparseAdam) and not settings.sparse_as_dense:
            self._dims = {name: 1 for name, _ in settings.naming.names(optimizer)}

    def goes_as_rows(self, name: str) -> bool:
        """True where the parameter's gradients are to be exchanged by ``start`` and not in a bucket."""
        return self._as_rows and self._dims is not None and name in self._dims

    def agree(self) -> bool:
        """Collective, after the first reduction: which gradients are sparse. True when the plan changes by that."""
        if self._dims is not None:
            return False
        found = allgather_object(self.seen, process_set=self._settings.process_set)
        self._dims = {name: dim for here in found for name, dim in here.items()}
        everyone = len(found) == self._settings.process_set.size()  # a rank that has joined makes no plans
        return bool(self._dims) and self._as_rows and everyone

    def start(self, slot: Slot, weight: float) -> Follow:
        """Start to exchange the rows of ``slot``'s gradient; a rank that has none takes part with no rows."""
        grad = slot.parameter.grad
        sparse_dim = (self._dims or {}).get(slot.name, 1)
        if grad is None:
            grad = _no_rows(slot.parameter, sparse_dim)
        elif not grad.is_sparse:
            grad = grad.to_sparse(sparse_dim)
        return sparse_allreduce_async(
            grad if weight == 1.0 else grad * weight, f"{slot.name}.rows", self._settings.op,
            self._settings.process_set,
        )

    def expose(self, slot: Slot) -> None:
        """Let ``.grad`` show what the bucket holds: sparse where the gradient was and the optimizer takes it."""
        sparse_dim = self._dims.get(slot.name) if self._dims and self._taken_sparse else None
        if sparse_dim is None:
            slot.expose()
        else:
            slot.expose_rows(sparse_dim)


def _no_rows(parameter: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty(0, *parameter.shape[sparse_dim:], requires_grad=False)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
