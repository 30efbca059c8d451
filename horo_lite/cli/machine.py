"""What this machine offers to a job: cores, memory, limits and networks, as far as this process may use them."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_MEMORY_QUOTAS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_SHARED_MEMORY = "/dev/shm"
_NETWORKS = Path("/sys/class/net")
_INFINIBAND = Path("/sys/class/infiniband")
_CONTAINER_MARKS = {
    "Docker": "/.dockerenv", "Podman": "/run/.containerenv", "Apptainer": "/.singularity.d",
    "Kubernetes": "/var/run/secrets/kubernetes.io",
}
_NO_QUOTA_BYTES = 1 << 60  # what the first version of control groups says for "none" is a page under 2^63


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


def memory_bytes() -> tuple[int, int | None]:
    """What the machine has, and what a container or a batch job may use of it; None for all."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _MEMORY_QUOTAS:
        try:
            quota = int(path.read_text())
        except (OSError, ValueError):  # no control groups, or "max"
            continue
        if quota < min(installed, _NO_QUOTA_BYTES):
            return installed, quota
    return installed, None


def shared_memory_bytes() -> tuple[int, int] | None:
    """Size and free bytes of /dev/shm; None where there is none."""
    try:
        room = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize


def limit(name: str) -> int | None:
    """A limit of this process by its name in ``resource``; None for unlimited."""
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def container() -> str:
    """What kind of container this is, "" for none that is known."""
    return next((name for name, mark in _CONTAINER_MARKS.items() if os.path.exists(mark)), "")


def networks() -> dict[str, str]:
    """Each network interface but the loopback, and what it says of its state and speed."""
    found = {}
    for folder in sorted(_NETWORKS.glob("*")):
        if folder.name == "lo":
            continue
        state, speed = _first_line(folder / "operstate"), _first_line(folder / "speed")
        found[folder.name] = f"{state}, {speed} Mbit/s" if speed.isdigit() else state
    return found


def infiniband() -> list[str]:
    """The names of adapters that registered (locked) memory is needed for."""
    return sorted(path.name for path in _INFINIBAND.glob("*"))


def is_root() -> bool:
    """Whether this process runs as root, which Open MPI refuses by default."""
    return os.geteuid() == 0


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a device that is down has no speed
        return ""
