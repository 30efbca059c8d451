"""Which gradients travel together, and where each lies in its bucket: a plan made once.

Second stage of the data path. A plan is a pure function of the gradients' names, shapes and types,
the bucket size, the groups and the order, so every rank computes the same one and only a digest is
compared. Nothing here holds memory or knows a framework: the engine makes a flat array of
``bucket.elements`` elements and the gradients are views into it.
"""

from __future__ import annotations

from horo_lite.buckets.layout import ALIGNMENT_BYTES, Bucket, GradientSpec, Slot, common_fate
from horo_lite.buckets.plan import BucketPlan, PlanDifference, plan
from horo_lite.buckets.progress import BucketProgress

__all__ = [
    "ALIGNMENT_BYTES",
    "Bucket",
    "BucketPlan",
    "BucketProgress",
    "GradientSpec",
    "PlanDifference",
    "Slot",
    "common_fate",
    "plan",
]
