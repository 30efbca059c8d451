"""Buckets for an optimizer's gradients, wherever its parameters lie: a bucket is memory of one device."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

from horo_lite.errors import HorovodInternalError
from horo_lite.gradients import GradientBuckets
from horo_lite.torch.agreement import describe

Named = Sequence[tuple[str, torch.Tensor]]
States = Sequence[MutableMapping[str, Any]]
Groups = int | Sequence[Sequence[int]] | None


def device_of(parameter: torch.Tensor) -> str:
    """Torch's name of a device."""
    return str(parameter.device)


def make_buckets(
    named: Named, states: States, groups: Groups, label: str, **options: Any
) -> GradientBuckets | DeviceBuckets:
    """Collective: buckets for the gradients of these parameters.

    Args:
        named: names and parameters, in the same order on every rank.
        states: per parameter, what a compressor keeps from step to step.
        groups: as ``GradientBuckets`` takes them; a group is divided where its parameters lie on several devices.
        label: what messages call it.
        options: further keywords of ``GradientBuckets``.
    """
    places: dict[str, list[int]] = {}
    for index, (_, parameter) in enumerate(named):
        places.setdefault(device_of(parameter), []).append(index)
    if len(places) > 1:
        return DeviceBuckets(places, named, states, groups, label, options)
    device = next(iter(places), "cpu")
    return GradientBuckets(describe(named), states=states, groups=groups, label=label, device=device, **options)


class DeviceBuckets:
    """``GradientBuckets`` for every device, seen as one. They are reduced one after the other.

    Args:
        places: per device, in the order of their first parameters, the indices of those that lie there.

    Attributes:
        views: as those of ``GradientBuckets``.
    """

    def __init__(
        self,
        places: Mapping[str, Sequence[int]],
        named: Named,
        states: States,
        groups: Groups,
        label: str,
        options: Mapping[str, Any],
    ) -> None:
        # Autograd has a thread for each device, so that buckets of two may be complete in another order elsewhere.
        options = {**options, "overlap": False}
        self._parts: list[tuple[GradientBuckets, Sequence[int]]] = []
        self._part_of: list[Any] = [None] * len(named)
        self.views: list[Any] = [None] * len(named)
        for device, indices in places.items():
            part = GradientBuckets(
                describe([named[index] for index in indices]),
                states=[states[index] for index in indices],
                groups=_groups_among(indices, groups),
                label=f"{label} on {device}",
                device=device,
                **options,
            )
            self._parts.append((part, indices))
            for place, (index, view) in enumerate(zip(indices, part.views, strict=True)):
                self._part_of[index] = part, place
                self.views[index] = view

    def ready(self, index: int) -> None:
        """See ``GradientBuckets``."""
        part, place = self._part_of[index]
        part.ready(place)

    def finish(self, failed: bool = False) -> list[bool]:
        """See ``GradientBuckets``; a step that has failed on one device ends on all."""
        used = [False] * len(self.views)
        fault: HorovodInternalError | None = None
        for part, indices in self._parts:
            try:
                for index, is_used in zip(indices, part.finish(failed), strict=True):
                    used[index] = is_used
            except HorovodInternalError as error:
                fault = fault or error
        if fault is not None:
            raise fault
        return used

    def close(self) -> None:
        """See ``GradientBuckets``."""
        for part, _ in self._parts:
            part.close()


def _groups_among(indices: Sequence[int], groups: Groups) -> Groups:
    """The groups of what lies on one device, by the places among ``indices``."""
    if groups is None or isinstance(groups, int):
        return groups
    places = {index: place for place, index in enumerate(indices)}
    shares = [[places[index] for index in group if index in places] for group in groups]
    return [share for share in shares if share]
