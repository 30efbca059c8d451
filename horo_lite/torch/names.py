"""What ranks know a parameter by."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from horo_lite.compression import is_compression
from horo_lite.errors import ArgumentError, ArgumentTypeError


class Naming:
    """Names for an optimizer's parameters: the model's, or numbers where the user gave none.

    Args:
        named_parameters: pairs of (name, parameter), or None.
        optimizer: whose parameters must all be among them.

    Raises:
        ValueError: not such pairs, a name twice, or parameters that are missing.
    """

    def __init__(self, named_parameters: Any, optimizer: torch.optim.Optimizer) -> None:
        self._named = [] if named_parameters is None else _pairs(named_parameters)
        self._names = {id(parameter): name for name, parameter in self._named}
        if named_parameters is not None:
            self._check_unique()
            self._check_complete(optimizer)

    def names(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
        """Every parameter of the optimizer, in its order."""
        return [
            (self._names.get(id(parameter), f"allreduce.noname.{i}.{j}"), parameter)
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
        ]

    def _check_unique(self) -> None:
        counts = Counter(name for name, _ in self._named)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise ArgumentError(
                f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}"
            )

    def _check_complete(self, optimizer: torch.optim.Optimizer) -> None:
        missing = [
            f"parameter {j} of group {i}, shape {list(parameter.shape)} ({name})"
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
            if id(parameter) not in self._names
            for name in [group["param_names"][j] if "param_names" in group else "no name"]
        ]
        if missing:
            raise ArgumentError(
                f"named_parameters was specified, but {len(missing)} parameters of the optimizer were not "
                f"named: {'; '.join(missing[:8])}. Pass model.named_parameters() of every model whose "
                "parameters the optimizer has"
            )


def _pairs(named_parameters: Any) -> list[tuple[str, torch.Tensor]]:
    if is_compression(named_parameters):
        raise ArgumentTypeError(
            f"named_parameters is {named_parameters!r}, a compression; pass it by its name: "
            "DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), "
            "compression=hvd.Compression.fp16)"
        )
    if isinstance(named_parameters, torch.nn.Module):
        named_parameters = named_parameters.named_parameters()
    pairs = list(named_parameters.items() if isinstance(named_parameters, dict) else named_parameters)
    for entry in pairs:
        is_pair = isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)
        if not (is_pair and isinstance(entry[1], torch.Tensor)):
            raise ArgumentError(
                "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                f"model.named_parameters(); got {type(entry).__name__}"
            )
    return pairs
