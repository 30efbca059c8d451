"""The place of one parameter's gradient: between torch's ``.grad`` and a flat view into a bucket."""

from __future__ import annotations

from typing import Any

import torch

from horo_lite.arrays import to_torch
from horo_lite.interfaces import Array


class Slot:
    """One parameter and where its gradient lives.

    Attributes:
        name: what ranks know it by.
        number: which gradient of the buckets it is, -1 for one that is exchanged as rows.
        passes: backward passes that have reached it since the last reduction.
        handed_over: its gradient may be under way. ``.grad`` is None meanwhile, so that a second gradient in the same
            backward lands beside the bucket and not in it.
        reduced: ``.grad`` holds what the last reduction gave.
        released: another optimizer exchanges it now.
    """

    __slots__ = (
        "_grad", "_place", "handed_over", "name", "number", "parameter", "passes", "reduced", "released",
    )

    def __init__(self, name: str, parameter: torch.Tensor) -> None:
        self.name = name
        self.parameter: Any = parameter
        self.number = -1
        self.passes = 0
        self.handed_over = False
        self.reduced = False
        self.released = False
        self._place: Any = None
        self._grad: Any = None

    def bind(self, number: int, view: Array) -> None:
        """Let the gradient live in ``view``, a flat array of the parameter's type in row-major order."""
        self.number = number
        parameter = self.parameter.detach()
        flat = view if isinstance(view, torch.Tensor) else to_torch(view)
        if parameter.is_contiguous():
            # The parameter's strides, even those of dimensions of one element: fused optimizers compare them.
            self._place = flat.as_strided(parameter.shape, parameter.stride())
            self._grad = self._place.detach()
        else:
            self._place = flat.view(parameter.shape)
            self._grad = torch.empty_like(parameter)

    def fits(self, grad: Any) -> bool:
        """False once ``model.half()`` or the like has changed the gradient's type, device or shape."""
        place = self._place
        return grad.dtype is place.dtype and grad.device == place.device and grad.shape == place.shape

    def take(self, factor: float = 1.0) -> None:
        """Put ``.grad``, times ``factor``, into the bucket, and make the bucket's memory ``.grad``."""
        grad = self.parameter.grad
        if grad is not self._grad or grad.data_ptr() != self._place.data_ptr():
            if grad.is_sparse:
                self._place.zero_()
                self.add(grad)
            else:
                self._place.copy_(grad.detach())
            self.expose()
        if factor != 1.0:
            self._place.mul_(factor)

    def expose(self) -> None:
        """Let ``.grad`` show what the bucket holds."""
        if self._grad.data_ptr() != self._place.data_ptr():
            if self._grad.stride() == self._place.stride():
                self._grad = self._place.detach()  # model.to() had given the old one other memory
            else:
                self._grad.copy_(self._place)
        self.parameter.grad = self._grad

    def expose_rows(self, sparse_dim: int) -> None:
        """Let ``.grad`` be a sparse tensor of what the bucket holds."""
        self.parameter.grad = self._place.to_sparse(sparse_dim)

    def add(self, grad: Any, factor: float = 1.0) -> None:
        """Scale what the bucket holds, and add a gradient."""
        if factor != 1.0:
            self._place.mul_(factor)
        if grad.is_sparse:
            self._place.index_put_(tuple(grad.detach()._indices()), grad.detach()._values(), accumulate=True)
        else:
            self._place.add_(grad.detach())

    def put(self, values: torch.Tensor) -> None:
        """Write something else than ``.grad`` into the bucket."""
        self._place.copy_(values)

    def value(self) -> torch.Tensor:
        """What the bucket holds, in the parameter's shape."""
        return self._place
