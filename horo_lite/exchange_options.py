"""How gradients are exchanged: what the distributed optimizers and tapes of TensorFlow and Keras have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from horo_lite import functions
from horo_lite.errors import ArgumentError, DisagreementError
from horo_lite.functions import Average, reduction_of
from horo_lite.gradients import GradientBuckets
from horo_lite.interfaces import Reduction
from horo_lite.process_sets import ProcessSet, global_process_set

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
        alike: what else must be the same on every rank.

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
    alike: Mapping[str, object] = dataclasses.field(default_factory=dict, hash=False)

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
        return self.process_set.included()

    @property
    def size(self) -> int:
        """The number of ranks that take part."""
        return self.process_set.size()

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
            alike={
                "sparse_as_dense": self.sparse_as_dense,
                "scale_local_gradients": self.scale_local_gradients,
                **self.alike,
            },
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


def reduced_among_local(
    options: ExchangeOptions,
    gradients: Sequence[Any],
    local: Sequence[bool],
    reduce: Callable[[list[int]], Sequence[Any]],
) -> list[Any]:
    """Gradients as an optimizer is to see them: reduced, but for those that stay on their rank.

    Args:
        local: which ones those are; they are divided by the number of ranks where the options say so, so that they
            weigh as the averaged ones do.
        reduce: reduces the gradients of these places.
    """
    results = list(gradients)
    if not options.takes_part:
        return results
    shared = [place for place, is_local in enumerate(local) if not is_local]
    if shared:
        for place, gradient in zip(shared, reduce(shared), strict=True):
            results[place] = gradient
    if options.scale_local_gradients:
        for place, is_local in enumerate(local):
            if is_local and results[place] is not None:
                results[place] = _divided(results[place], options.size)
    return results


def _divided(gradient: Any, size: int) -> Any:
    if hasattr(gradient, "dense_shape"):  # tf.IndexedSlices
        return type(gradient)(gradient.values / size, gradient.indices, gradient.dense_shape)
    return gradient / size


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
    Keras drops a model's name from its variables' paths when the model is loaded. So only layer and variable count, a
    number at the end of a word is replaced by its place among those of the same word, and equal names are told apart.
    Numbers keep their order, so that ranks that have two layers in another order do not get the same names.
    """
    words = [path.split(":")[0].split("/")[-2:] for path in paths]
    numbers: dict[str, set[int]] = {}
    for stem, number in (_numbered(word) for path in words for word in path):
        numbers.setdefault(stem, set()).add(number)

    def renumbered(word: str) -> str:
        stem, number = _numbered(word)
        place = sorted(numbers[stem]).index(number)
        return f"{stem}_{place}" if place else stem

    names, used = [], dict[str, int]()
    for path in words:
        name = "/".join(renumbered(word) for word in path)
        used[name] = used.get(name, 0) + 1
        names.append(name if used[name] == 1 else f"{name}#{used[name]}")
    return names


def _numbered(word: str) -> tuple[str, int]:
    """A word and the number at its end, -1 where there is none."""
    stem, _, digits = word.rpartition("_")
    return (stem, int(digits)) if stem and digits.isdecimal() else (word, -1)


def variable_path(variable: Any) -> str:
    """Keras' path of a variable, the name of another."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", "variable"))


def check_same_variables(
    variables: Sequence[ParameterSpec], trainable: Sequence[bool], process_set: ProcessSet
) -> None:
    """Collective: compare ranks' lists of variables before their values are exchanged.

    Args:
        trainable: which of them have a name to be compared, so that two of equal shape in another order are found
            out. An optimizer's variables have names that depend on whether the model was loaded.

    Raises:
        DisagreementError: they differ; on every rank, with the first that does.
    """
    named = iter(stable_names([path for (path, _, _), known in zip(variables, trainable, strict=True) if known]))
    own = [
        (next(named) if known else "", tuple(shape), kind)
        for (_, shape, kind), known in zip(variables, trainable, strict=True)
    ]
    everyone = functions.allgather_object(own, "broadcast_variables.names", process_set)
    ranks = process_set.ranks or range(len(everyone))
    for rank, other in zip(ranks, everyone, strict=False):
        if other == everyone[0]:
            continue
        place = next(
            (i for i, (a, b) in enumerate(zip(everyone[0], other, strict=False)) if a != b),
            min(len(everyone[0]), len(other)),
        )
        here, there = (listed[place] if place < len(listed) else "absent" for listed in (everyone[0], other))
        path = variables[place][0] if place < len(variables) else "absent here"
        raise DisagreementError(
            f"ranks have different variables: rank {ranks[0]} has {len(everyone[0])} and rank {rank} has "
            f"{len(other)}; the first difference is number {place} ({path}): {here} and {there}. "
            "Build the same model and optimizer on every rank, in the same order"
        )
