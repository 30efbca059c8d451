"""``torch.amp.GradScaler`` with a step that starts from each rank's own gradients: Adasum's, OneBitAdam's.

Such optimizers say that they support it, so that the scaler calls their ``step()`` in any case and leaves them
``grad_scale`` (None once the user has unscaled) and ``found_inf``, which are this rank's.
"""

from __future__ import annotations

from typing import Any

import torch

from horo_lite.functions import Max, allreduce
from horo_lite.process_sets import ProcessSet


def overflowed(optimizer: Any, process_set: ProcessSet) -> bool:
    """Collective where a scaler calls ``step()``: it found an infinity on some rank, so that all skip the step."""
    found = getattr(optimizer, "found_inf", None)
    if found is None:
        return False
    return bool(allreduce(torch.as_tensor(found, dtype=torch.float32), op=Max, process_set=process_set))


def unscaled(optimizer: Any, grad: torch.Tensor) -> torch.Tensor:
    """A gradient without the scaler's factor."""
    scale = getattr(optimizer, "grad_scale", None)
    return grad if scale is None else grad / scale.to(grad.device, grad.dtype)


def unscale(optimizer: Any) -> None:
    """Take the scaler's factor out of all gradients, for a step that knows nothing of it."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad = unscaled(optimizer, p.grad)
    if hasattr(optimizer, "grad_scale"):
        optimizer.grad_scale = optimizer.found_inf = None
