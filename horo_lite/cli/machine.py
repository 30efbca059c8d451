"""What this machine offers to a job: cores and shared memory, as far as this process may use them."""

from __future__ import annotations

import os
from pathlib import Path

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_SHARED_MEMORY = "/dev/shm"


def allowed_cores() -> list[int]:
    """The cores that this process may run on, by affinity."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """How many cores' worth of time there is: the affinity, or a container's quota where that is less."""
    cores = len(allowed_cores())
    try:
        quota, period = _CPU_QUOTA.read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no control groups, or "max": no quota
        return cores


def shared_memory_bytes() -> tuple[int, int] | None:
    """Size and free bytes of /dev/shm; None where there is none."""
    try:
        room = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize


def is_root() -> bool:
    """Whether this process runs as root, which Open MPI refuses by default."""
    return os.geteuid() == 0
