"""Which parameters a plan was made for, and whether that still holds."""

from __future__ import annotations

import operator

import torch

from horo_lite.context import current


class Roster:
    """An optimizer's parameters at the moment of planning, and the world they are exchanged in.

    Args:
        optimizer: whose.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._context = current()
        self._parameters = _parameters(optimizer)
        self._frozen = [p for p in self._parameters if not p.requires_grad]

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """False after ``shutdown()`` and ``init()``, and once frozen parameters are not or the groups have others."""
        now = _parameters(optimizer)
        return (
            current() is self._context
            and not any(p.requires_grad for p in self._frozen)
            and len(now) == len(self._parameters)
            and all(map(operator.is_, now, self._parameters))
        )


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
