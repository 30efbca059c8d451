"""How gradients are exchanged: what the distributed optimizers and tapes of TensorFlow and Keras have in common."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from horo_lite.context import ProcessSet, current, global_process_set
from horo_lite.errors import ArgumentError
from horo_lite.functions import Average, reduction_of
from horo_lite.gradients import GradientBuckets
from horo_lite.interfaces import Reduction

ParameterSpec = tuple[str, tuple[int, ...], str]
"""Name, shape, element type."""


class SameVariable:
    """A variable in a group: hashed and compared by identity (TensorFlow compares variables by their values)."""

    def __init__(self, variable: Any) -> None:
        self.variable = variable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameVariable) and other.variable is self.variable

    def __hash__(self) -> int:
        return id(self.variable)


@dataclasses.dataclass(frozen=True)
class ExchangeOptions:
    """The keywords that every distributed optimizer and tape takes, checked.

    Attributes:
        op: Average, Sum or Adasum.
        gradient_predivide_factor: f: gradients are divided by f before the sum and by N / f after it.
        compression: what goes on the wire; None for the gradients themselves.
        sparse_as_dense: ``tf.IndexedSlices`` travel as dense gradients.
        groups: a number of groups, or lists of variables that travel as one unit.
        process_set: the ranks that take part; others train by themselves.
        scale_local_gradients: gradients of local variables are divided by the number of ranks.
        label: what messages call it.

    Raises:
        ArgumentError: a value, or two together, make no sense.
    """

    op: Reduction = Average
    gradient_predivide_factor: float = 1.0
    compression: Any = None
    sparse_as_dense: bool = False
    groups: int | tuple[tuple[SameVariable, ...], ...] | Any = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    label: str = "optimizer"

    def __post_init__(self) -> None:
        op = reduction_of(None, self.op)
        object.__setattr__(self, "op", op)
        if op not in (Reduction.AVERAGE, Reduction.SUM, Reduction.ADASUM):
            raise ArgumentError(f"op={op.name.title()}: gradients are reduced with Average, Sum or Adasum")
        if self.gradient_predivide_factor != 1.0 and op is not Average:
            raise ArgumentError(
                f"gradient_predivide_factor={self.gradient_predivide_factor} works with op=Average only, "
                f"got op={op.name.title()}"
            )
        object.__setattr__(self, "groups", _checked_groups(self.groups))

    @property
    def takes_part(self) -> bool:
        """False on ranks outside the process set."""
        return self.process_set.process_set_id == 0 or self.process_set.included()

    @property
    def size(self) -> int:
        """The number of ranks that take part."""
        return current().size if self.process_set.process_set_id == 0 else self.process_set.size()

    def buckets(
        self, parameters: Sequence[ParameterSpec], variables: Sequence[Any], device: str = "cpu"
    ) -> GradientBuckets:
        """Collective: the buckets for gradients of these parameters.

        Args:
            variables: what the caller's groups are made of, one per parameter.
        """
        factor = self.gradient_predivide_factor
        return GradientBuckets(
            parameters,
            process_set=self.process_set,
            op=self.op,
            prescale_factor=1.0 / factor,
            postscale_factor=factor,
            compression=self.compression,
            groups=self._group_indices(variables),
            label=self.label,
            device=device,
        )

    def _group_indices(self, variables: Sequence[Any]) -> int | list[list[int]] | None:
        if self.groups is None or isinstance(self.groups, int):
            return self.groups
        place = {id(variable): index for index, variable in enumerate(variables)}
        return [
            indices
            for group in self.groups
            if (indices := [place[id(member.variable)] for member in group if id(member.variable) in place])
        ]


def _checked_groups(groups: Any) -> int | tuple[tuple[SameVariable, ...], ...] | None:
    if groups is None or (isinstance(groups, int) and groups == 0):
        return None
    if isinstance(groups, int) and groups > 0:
        return groups
    if isinstance(groups, Iterable) and not isinstance(groups, str):
        listed = tuple(tuple(SameVariable(variable) for variable in group) for group in groups)
        members = [member for group in listed for member in group]
        if len(members) == len(set(members)):
            return listed
    raise ArgumentError(
        f"groups={groups!r}: expected a number of groups, or lists of variables in which each variable occurs once"
    )


def chosen_groups(groups: Any, num_groups: int, unwrapped: Callable[[Any], Any]) -> Any:
    """``groups``, or Horovod's deprecated ``num_groups``; its variables as the framework's own."""
    if groups is None or isinstance(groups, int) or not isinstance(groups, Iterable) or isinstance(groups, str):
        return groups or num_groups or None
    return [[unwrapped(variable) for variable in group] for group in groups]


def stable_names(paths: Sequence[str]) -> list[str]:
    """Names for parameters that are the same on ranks that built the same model.

    Frameworks number what has no name ("dense_7/kernel"), and a rank that built another model before counts further;
    Keras drops a model's name from its variables' paths when the model is loaded. So only layer and variable count,
    numbers at the end of a word are replaced by the word's order of appearance, and equal names are told apart.
    """
    seen: dict[str, dict[str, int]] = {}

    def renumbered(word: str) -> str:
        stem = re.sub(r"_\d+$", "", word)
        known = seen.setdefault(stem, {})
        place = known.setdefault(word, len(known))
        return f"{stem}_{place}" if place else stem

    names, used = [], dict[str, int]()
    for path in paths:
        name = "/".join(renumbered(word) for word in path.split(":")[0].split("/")[-2:])
        used[name] = used.get(name, 0) + 1
        names.append(name if used[name] == 1 else f"{name}#{used[name]}")
    return names
