"""Which buckets of a step are complete, and in which order they go: the same on all ranks, whatever is ready first."""

from __future__ import annotations

from collections.abc import Iterator

from horo_lite.buckets.plan import BucketPlan


class BucketProgress:
    """The buckets of one plan, step by step.

    Attributes:
        order: that in which buckets go; the plan's until ranks agree on another.
        ready: per gradient, whether it is in its place in this step.
    """

    def __init__(self, plan: BucketPlan) -> None:
        self._slots = [len(bucket.slots) for bucket in plan.buckets]
        bucket_of = {slot.index: bucket.index for bucket in plan.buckets for slot in bucket.slots}
        self._bucket_of = [bucket_of[index] for index in range(len(bucket_of))]
        self.order = list(range(len(plan.buckets)))
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.ready = [False] * len(self._bucket_of)
        self._missing = list(self._slots)
        self._completed: list[int] = []
        self._gone = 0

    def put(self, index: int) -> bool:
        """A gradient is in its place. True when its bucket has now become complete."""
        if self.ready[index]:
            return False
        self.ready[index] = True
        bucket = self._bucket_of[index]
        missing = self._missing[bucket] = self._missing[bucket] - 1
        if missing:
            return False
        self._completed.append(bucket)
        return True

    def due(self) -> Iterator[int]:
        """The buckets that may go now: complete ones, as long as none before them is missing. They count as gone."""
        while self._gone < len(self.order) and not self._missing[self.order[self._gone]]:
            self._gone += 1
            yield self.order[self._gone - 1]

    def rest(self) -> list[int]:
        """All that have not gone, complete or not. They count as gone."""
        rest, self._gone = self.order[self._gone :], len(self.order)
        return rest

    def as_completed(self) -> list[int]:
        """All buckets in the order in which they became complete in this step, the others behind."""
        return [*self._completed, *(bucket for bucket, missing in enumerate(self._missing) if missing)]
