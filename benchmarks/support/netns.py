"""Several hosts on one Linux machine: network namespaces on a switch, each link shaped to a rate.

::

    with Cluster(hosts=4, rate="100mbit") as cluster:
        cluster.run([sys.executable, "job.py"], ranks=8, per_host=2, limit_s=60)
        cluster.shape("10mbit")

Real TCP over real (if virtual) interfaces: what a kernel does on a slow network happens here too. A host has its own
network, name and /dev/shm, so that an MPI library takes it for another machine. Needs root, iproute2 and util-linux;
nothing leaves the machine. Ranks are started by MPICH's Hydra, or Intel MPI's.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

_NETWORK = "10.77.0"  # inside the namespaces only, so any number of clusters may use it
_BURST, _QUEUE = "128kb", "50ms"  # a burst of at least one 64 KiB segment that the kernel hands down whole
_SHARED_MEMORY = "1g"
_NAME = re.compile(r"hl(\d+)(?:h\d+|sw)\b")  # of a namespace: who made it, which it is
TCP_SHARE = 1448 / 1514
"""What TCP carries of a link's bits: payload over Ethernet frame, with IP and TCP headers and a timestamp."""

# Hydra calls it as ssh: options, host, command. Not exec'ed, so that like ssh it stays on the calling host.
_AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
"$(dirname "$0")/enter" "$host" /bin/sh -c "$*"
status=$?
[ $status -lt 128 ] || status=255
exit $status
"""

# `ip netns exec` also mounts the host's own /etc/hosts.
_ENTER = """#!/bin/sh
host=$1; shift
exec ip netns exec "$host" unshare --uts --ipc --mount /bin/sh -c '
    hostname "$1"; shift
    mount -t tmpfs -o size=SIZE tmpfs /dev/shm
    exec "$@"' sh "$host" "$@"
"""


def why_unavailable() -> str:
    """The reason why no cluster can be made here; "" where one can."""
    if os.name != "posix" or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found: install iproute2, util-linux and hostname"
    try:
        with Cluster(hosts=1, rate="1gbit"):
            return ""
    except ClusterError as error:
        return str(error)


def find_hydra() -> str | None:
    """MPICH's launcher: beside this Python, else on PATH."""
    return shutil.which("mpiexec.hydra", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec.hydra")


class ClusterError(RuntimeError):
    """A command that makes or changes the network failed; carries the command and its words."""


class Cluster:
    """A context manager: the hosts exist within it, and whatever runs on them is killed at its end.

    Args:
        hosts: how many.
        rate: of every link in both directions, as ``tc`` writes it ("100mbit").
    """

    def __init__(self, hosts: int, rate: str) -> None:
        prefix = f"hl{os.getpid()}"
        self.hosts = [f"{prefix}h{number}" for number in range(1, hosts + 1)]
        self._switch = f"{prefix}sw"
        self._rate = rate
        self._folder = Path()

    def __enter__(self) -> Cluster:
        self._folder = Path(tempfile.mkdtemp(prefix="cluster-"))
        self._terminated = signal.signal(signal.SIGTERM, _leave)  # else nobody would take the hosts down
        _remove(namespace for namespace in _namespaces() if not _maker_lives(namespace))
        try:
            self._write_scripts()
            self._make_switch()
            for number, host in enumerate(self.hosts, 1):
                self._make_host(number, host)
            self.shape(self._rate)
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tear_down()

    @property
    def scripts(self) -> Path:
        """The folder with ``enter``, which runs a command on a host, and ``agent``, the same called as ssh is."""
        return self._folder

    def shape(self, rate: str) -> None:
        """Give every link another rate, also while jobs run."""
        ends = [(host, "eth0") for host in self.hosts]
        ends += [(self._switch, f"port{number}") for number in range(1, len(self.hosts) + 1)]
        for namespace, device in ends:
            _do(
                "ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", device, "root",
                "tbf", "rate", rate, "burst", _BURST, "latency", _QUEUE,
            )

    def run(
        self, command: Sequence[str], ranks: int, per_host: int, limit_s: float, mpirun: str = "mpirun"
    ) -> subprocess.CompletedProcess[str]:
        """Run an MPI job over the hosts.

        Args:
            command: what each rank runs.
            per_host: consecutive ranks on each host.
            mpirun: Hydra's launcher.

        Returns:
            exit status and output, errors included.

        Raises:
            subprocess.TimeoutExpired: it took longer than ``limit_s``; its processes are killed.
        """
        environment = {**os.environ, "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0"}
        words = [
            str(self._folder / "enter"), self.hosts[0], mpirun, "-launcher", "ssh",
            "-launcher-exec", str(self._folder / "agent"), "-iface", "eth0",
            "-f", str(self._folder / "machines"), "-ppn", str(per_host), "-n", str(ranks), *command,
        ]
        with subprocess.Popen(
            words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit_s)
            except BaseException:
                for host in self.hosts:
                    _kill_all(host)
                process.kill()
                raise
        return subprocess.CompletedProcess(words, process.returncode, output)

    def _write_scripts(self) -> None:
        for name, text in (("agent", _AGENT), ("enter", _ENTER.replace("SIZE", _SHARED_MEMORY))):
            path = self._folder / name
            path.write_text(text)
            path.chmod(0o755)
        (self._folder / "machines").write_text("".join(f"{host}\n" for host in self.hosts))

    def _make_switch(self) -> None:
        _do("ip", "netns", "add", self._switch)
        _do("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _do("ip", "-n", self._switch, "link", "set", "bridge", "up")

    def _make_host(self, number: int, host: str) -> None:
        port, switch = f"port{number}", self._switch
        _do("ip", "netns", "add", host)
        known = "".join(f"{_NETWORK}.{n} {name}\n" for n, name in enumerate(self.hosts, 1))
        _hosts_file(host).parent.mkdir(parents=True, exist_ok=True)
        _hosts_file(host).write_text(f"127.0.0.1 localhost\n{known}")
        _do(
            "ip", "link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", port, "netns", switch
        )
        _do("ip", "-n", host, "addr", "add", f"{_NETWORK}.{number}/24", "dev", "eth0")
        for namespace, device in ((host, "lo"), (host, "eth0"), (switch, port)):
            _do("ip", "-n", namespace, "link", "set", device, "up")
        _do("ip", "-n", switch, "link", "set", port, "master", "bridge")

    def _tear_down(self) -> None:
        """Also after a failure half way: what does not exist is not removed."""
        _remove((*self.hosts, self._switch))
        shutil.rmtree(self._folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, self._terminated)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _namespaces() -> list[str]:
    """Those of all clusters on this machine."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    return [line.split()[0] for line in listed.stdout.splitlines() if _NAME.match(line)]


def _maker_lives(namespace: str) -> bool:
    """False for what a killed process has left behind."""
    name = _NAME.match(namespace)
    return name is None or Path("/proc", name[1]).exists()


def _remove(namespaces: Iterable[str]) -> None:
    """Kill what runs in them, and delete them."""
    for namespace in namespaces:
        _kill_all(namespace)
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
        shutil.rmtree(_hosts_file(namespace).parent, ignore_errors=True)
    try:
        Path("/etc/netns").rmdir()
    except OSError:
        pass  # others use it, or it was never made


def _kill_all(namespace: str) -> None:
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    for pid in found.stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass


def _hosts_file(host: str) -> Path:
    return Path("/etc/netns") / host / "hosts"


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"{shlex.join(words)}: {(done.stderr or done.stdout).strip()}")
