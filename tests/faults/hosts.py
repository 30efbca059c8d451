"""Pretend hosts for fault tests: network namespaces on a switch, whose links are cut and whose processes are killed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.support.netns import Cluster, why_unavailable
from tests.launch import SCALE, child_environment, launcher

_NOWHERE = "02:00:00:00:00:99"


@contextmanager
def cluster(hosts: int) -> Iterator[Cluster]:
    """Hosts on links of 1 Gbit/s; skips the test where none can be made, or where Hydra is not the launcher."""
    reason = why_unavailable() or ("" if launcher().name == "mpich" else "hosts are reached by MPICH's launcher")
    if reason:
        pytest.skip(reason)
    with Cluster(hosts, "1gbit") as made:
        yield made


def part(made: Cluster, one: int, other: int) -> None:
    """Let what two hosts (numbered from 0) send to one another vanish on its way, silently."""
    for own, peer in ((one, other), (other, one)):
        words = f"ip -n {made.hosts[own]} neigh replace 10.77.0.{peer + 1} lladdr {_NOWHERE} dev eth0 nud permanent"
        subprocess.run(words.split(), check=True)


def on_first_host(
    made: Cluster, command: Sequence[str], limit_s: float, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command there, with Hydra told how the other hosts are reached."""
    hydra = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(made.scripts / "agent"), "FI_PROVIDER": "tcp", **env}
    return subprocess.run(
        [str(made.scripts / "enter"), made.hosts[0], *command], env={**child_environment(), **hydra},
        capture_output=True, text=True, timeout=limit_s * SCALE,
    )


def processes(made: Cluster, name: str) -> list[int]:
    """What runs on the hosts of programs whose name begins so."""
    found = []
    for host in made.hosts:
        listed = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=False)
        found += [int(pid) for pid in listed.stdout.split() if _program(pid).startswith(name)]
    return found


def _program(pid: str) -> str:
    try:
        return Path("/proc", pid, "comm").read_text()
    except OSError:  # it has just ended
        return ""
