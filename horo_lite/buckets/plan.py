"""The division of all gradients into buckets, the same on every rank."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from horo_lite.arrays import item_bytes
from horo_lite.arrays.types import COMPLEX, FLOATS
from horo_lite.buckets.layout import Bucket, GradientSpec, aligned, lay_out
from horo_lite.errors import ArgumentError, ArgumentTypeError

_PAGE_BYTES = 4096  # two buckets share no page of a block, so each can be handled on its own


class PlanDifference(NamedTuple):
    """The first thing in which two ranks' plans differ.

    Attributes:
        what: the name of a parameter, or of a setting ("bucket_bytes", "groups").
        ours: its value in the plan that was asked, "absent" where it has none.
        theirs: its value in the other plan.
    """

    what: str
    ours: str
    theirs: str


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """What ``plan`` returns. Plans that were made from equal arguments are equal.

    Attributes:
        specs: all gradients, in the order of registration.
        bucket_bytes: the size asked for.
        groups: names that must travel together, as given.
        buckets: in the order in which they are expected to be ready.
    """

    specs: tuple[GradientSpec, ...]
    bucket_bytes: int
    groups: tuple[tuple[str, ...], ...]
    buckets: tuple[Bucket, ...] = dataclasses.field(compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """The size of one memory block for all buckets, each at its ``offset_bytes``."""
        return _page_end(self.buckets[-1]) if self.buckets else 0

    @functools.cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal where plans are, on any machine."""
        content = [
            [[spec.name, spec.shape, spec.type_name] for spec in self.specs],
            self.bucket_bytes,
            self.groups,
        ]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).digest()

    def difference(self, other: BucketPlan) -> PlanDifference | None:
        """The first thing in which another rank's plan differs, None where the plans are equal.

        A parameter that only one of them has comes first, then shapes and types, then the order of
        registration, then the settings.
        """
        ours = {spec.name: spec for spec in self.specs}
        theirs = {spec.name: spec for spec in other.specs}
        names = [*ours, *(name for name in theirs if name not in ours)]
        for name in names:
            if name not in ours or name not in theirs:
                return PlanDifference(name, _told(ours, name), _told(theirs, name))
        for name in names:
            if ours[name] != theirs[name]:
                return PlanDifference(name, str(ours[name]), str(theirs[name]))
        for position, (name, their_name) in enumerate(zip(ours, theirs, strict=True)):
            if name != their_name:
                at = f"registered as number {position}"
                return PlanDifference(name, at, f"{their_name} {at}")
        for what in ("bucket_bytes", "groups"):
            pair = getattr(self, what), getattr(other, what)
            if pair[0] != pair[1]:
                return PlanDifference(what, *map(_short, pair))
        return None


def plan(
    specs: Iterable[GradientSpec],
    bucket_bytes: int,
    groups: int | Iterable[Iterable[str]] | None = None,
) -> BucketPlan:
    """Divide gradients into buckets.

    They are expected to be ready in the reverse of their order, since backward reaches the last layer
    first. In that order a bucket is filled up to ``bucket_bytes``, one open bucket per type; a larger
    gradient has a bucket of its own. Buckets are in the order in which their last gradient is ready.

    Args:
        specs: all gradients, in the order of registration (the same on all ranks).
        bucket_bytes: about the size of a bucket; 0 gives every gradient its own.
        groups: names whose gradients travel as one unit, whatever their size (one bucket per type
            in them); the names in no group are divided as usual. A number n > 0 makes n groups of
            equal length, as Horovod does.

    Raises:
        ArgumentError: names are not unique, unknown, or in two groups; a negative size.
        ArgumentTypeError: a gradient is neither floating-point nor complex.
    """
    specs = tuple(specs)
    by_name = _unique(specs)
    if bucket_bytes < 0:
        raise ArgumentError(f"expected bucket_bytes of 0 or more, got {bucket_bytes}")
    ready = list(by_name)[::-1]
    unit_names = _checked_groups(by_name, groups)
    numbers = {spec.name: number for number, spec in enumerate(specs)}
    place = {name: position for position, name in enumerate(ready)}
    units = _units(by_name, ready, unit_names, bucket_bytes)
    units.sort(key=lambda names: max(place[name] for name in names))
    buckets: list[Bucket] = []
    for names in units:
        offset_bytes = _page_end(buckets[-1]) if buckets else 0
        members = [(numbers[name], by_name[name]) for name in names]
        buckets.append(lay_out(len(buckets), offset_bytes, members))
    return BucketPlan(specs, bucket_bytes, unit_names, tuple(buckets))


def _units(
    by_name: Mapping[str, GradientSpec],
    ready: Sequence[str],
    groups: Sequence[Sequence[str]],
    bucket_bytes: int,
) -> list[list[str]]:
    """The names of each bucket, in the order in which they are ready."""
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    units: list[list[str]] = []
    grouped: dict[tuple[int, str], list[str]] = {}
    filling: dict[str, tuple[list[str], int]] = {}
    for name in ready:
        spec = by_name[name]
        if name in group_of:
            grouped.setdefault((group_of[name], spec.type_name), []).append(name)
            continue
        nbytes = aligned(spec.elements, spec.type_name) * item_bytes(spec.type_name)
        names, filled_bytes = filling.get(spec.type_name, ([], 0))
        if nbytes > bucket_bytes:
            units.append([name])  # the open bucket stays open: small ones around it share it
        elif names and filled_bytes + nbytes <= bucket_bytes:
            names.append(name)
            filling[spec.type_name] = names, filled_bytes + nbytes
        else:
            units.append([name])
            filling[spec.type_name] = units[-1], nbytes
    return units + list(grouped.values())


def _unique(specs: Sequence[GradientSpec]) -> dict[str, GradientSpec]:
    by_name: dict[str, GradientSpec] = {}
    for spec in specs:
        if spec.name in by_name:
            raise ArgumentError(
                f"parameter names must be unique, got {spec.name!r} twice: "
                f"{by_name[spec.name]} and {spec}"
            )
        if spec.type_name not in FLOATS | COMPLEX:
            raise ArgumentTypeError(
                f"a gradient is floating-point or complex, got {spec.type_name} for {spec.name!r}"
            )
        by_name[spec.name] = spec
    return by_name


def _checked_groups(
    by_name: Mapping[str, GradientSpec], groups: int | Iterable[Iterable[str]] | None
) -> tuple[tuple[str, ...], ...]:
    if groups is None:
        return ()
    if isinstance(groups, int):
        return _split(list(by_name), groups)
    taken: dict[str, int] = {}
    checked = tuple(tuple(group) for group in groups)
    for number, group in enumerate(checked):
        for name in group:
            if name not in by_name:
                raise ArgumentError(f"group {number} names {name!r}, which is no parameter here")
            if name in taken:
                raise ArgumentError(
                    f"each parameter is in one group, got {name!r} in {taken[name]} and {number}"
                )
            taken[name] = number
    return checked


def _split(names: list[str], parts: int) -> tuple[tuple[str, ...], ...]:
    """Horovod's ``split_list``: the first groups are longer by one where it does not divide."""
    if parts < 0:
        raise ArgumentError(f"expected a number of groups, 0 or more, got {parts}")
    parts = min(parts, len(names))
    if parts == 0:
        return ()
    length, longer = divmod(len(names), parts)
    ends = [(part + 1) * length + min(part + 1, longer) for part in range(parts)]
    return tuple(tuple(names[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True))


def _page_end(bucket: Bucket) -> int:
    return -(-(bucket.offset_bytes + bucket.nbytes) // _PAGE_BYTES) * _PAGE_BYTES


def _told(specs: Mapping[str, GradientSpec], name: str) -> str:
    return str(specs[name]) if name in specs else "absent"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
