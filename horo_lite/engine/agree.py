"""How ranks agree on a plan, once: digests first; plans themselves only to say where they differ."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Generator
from typing import Any

from horo_lite.buckets import BucketPlan
from horo_lite.engine.fabric import Fabric
from horo_lite.engine.sharing import gather_bytes
from horo_lite.errors import DisagreementError

_REFUSAL = b"this rank has no plan: "
_ADVICE = "Every rank must wrap the same model with the same options"


def refuse_plan(fault: str, fabric: Fabric) -> Generator[Any, Any, None]:
    """Schedule of a rank whose arguments make no plan: tell the others, which are in ``agree_on_plan``."""
    yield from gather_bytes(_REFUSAL + fault.encode(), fabric)


def agree_on_plan(
    plan: BucketPlan, settings: dict[str, str], label: str, fabric: Fabric
) -> Generator[Any, Any, None]:
    """Schedule: raise on every member unless all have the same plan and settings.

    Args:
        settings: what else must be the same (operation, compressor), as text.

    Raises:
        DisagreementError: says how many parameters each rank has and the first difference, with both values.
    """
    own = plan.digest + hashlib.blake2b(repr(sorted(settings.items())).encode(), digest_size=16).digest()
    digests = yield from gather_bytes(own, fabric)
    if all(digest == digests[0] for digest in digests):
        return
    for rank, digest in zip(fabric.ranks, digests, strict=True):
        if digest.startswith(_REFUSAL):
            fault = digest.removeprefix(_REFUSAL).decode()
            raise DisagreementError(f"{label}: rank {rank} could not take part: {fault}")
    packed = yield from gather_bytes(pickle.dumps((plan, settings)), fabric)
    offers: list[tuple[BucketPlan, dict[str, str]]] = [pickle.loads(content) for content in packed]
    raise DisagreementError(f"{label}: ranks differ in what they reduce: {_difference(offers, fabric)}. {_ADVICE}")


def _difference(offers: list[tuple[BucketPlan, dict[str, str]]], fabric: Fabric) -> str:
    first_plan, first_settings = offers[0]
    zero = fabric.ranks[0]
    for rank, (plan, settings) in zip(fabric.ranks, offers, strict=True):
        difference = first_plan.difference(plan)
        if difference is not None:
            counts = ", ".join(
                f"rank {r}: {len(p.specs)}" for r, (p, _) in zip(fabric.ranks[:8], offers, strict=False)
            )
            return (
                f"{difference.what} (rank {zero}: {difference.ours}; rank {rank}: {difference.theirs}) is the first "
                f"difference; numbers of parameters: {counts}"
            )
        for what, value in first_settings.items():
            if settings.get(what) != value:
                return f"{what} (rank {zero}: {value}; rank {rank}: {settings.get(what)})"
    return "settings"
