"""The command line: what is started, with which environment, and how its end is passed on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from click.testing import CliRunner

from horo_lite.cli import finding, launchers, machine, run
from horo_lite.cli.main import main
from horo_lite.cli.supervise import TIMED_OUT, supervise
from horo_lite.config import Config, mark_rank
from horo_lite.errors import MPIMissingError
from horo_lite.version import __version__

ENV = dict(os.environ)


@pytest.fixture
def hydra(monkeypatch):
    """A machine of four cores with MPICH."""
    monkeypatch.setattr(finding, "find_launcher", lambda library=None, name=None: launchers.Hydra("/mpich/mpirun"))
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)


def invoke(*words: str):
    return CliRunner().invoke(main, ["run", *words])


def test_version_and_help():
    assert CliRunner().invoke(main, ["--version"]).output == f"horo-lite, version {__version__}\n"
    for words in (["--help"], ["run", "--help"], ["doctor", "--help"]):
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0
        assert "Usage: " in result.output


def test_help_and_import_work_without_mpi4py():
    program = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "import horo_lite\n"
        "from horo_lite.cli.main import main\n"
        "main(['--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout


@pytest.mark.parametrize(
    ("allocation", "words", "ranks", "threads"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "6", "SLURM_JOB_NUM_NODES": "3"}, [], 6, 2),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "6", "SLURM_JOB_NUM_NODES": "3"}, ["-np", "4"], 4, 2),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "6", "SLURM_JOB_NUM_NODES": "3"}, ["-H", "a:4"], 4, 1),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, ["-np", "2"], 2, 4),
        ({"SLURM_NTASKS": "6", "SLURM_JOB_NUM_NODES": "3"}, ["-np", "4"], 4, 1),
    ],
)
def test_ranks_and_threads_are_those_that_slurm_has_allocated(hydra, monkeypatch, allocation, words, ranks, threads):
    for name, value in allocation.items():
        monkeypatch.setenv(name, value)
    result = invoke(*words, "--dry-run", "train.py")
    assert result.exit_code == 0, result.output
    assert f"-np {ranks} " in result.output
    assert f"OMP_NUM_THREADS={threads} " in result.output


def test_an_allocation_that_names_no_number_needs_np(hydra, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    result = invoke("--dry-run", "train.py")
    assert result.exit_code == 2
    assert "-np N" in result.output


def test_a_dry_run_prints_the_whole_command(hydra):
    result = invoke("-np", "2", "--dry-run", "train.py", "--lr", "1", "-v")
    assert result.exit_code == 0, result.output
    assert result.output == (
        "env OMP_NUM_THREADS=2 TF_NUM_INTRAOP_THREADS=2 "
        f"/mpich/mpirun -np 2 -prepend-rank {sys.executable} train.py --lr 1 -v\n"
    )


@pytest.mark.parametrize("ranks, threads", [(1, 4), (2, 2), (3, 1), (8, 1)])
def test_threads_are_the_ranks_share_of_the_cores(hydra, ranks, threads):
    assert f"OMP_NUM_THREADS={threads} " in invoke("-np", str(ranks), "--dry-run", "train.py").output


def test_the_users_threads_stay(hydra, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in invoke("-np", "2", "--dry-run", "train.py").output


def test_the_alias_folder_comes_first_on_the_path(hydra, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert f"PYTHONPATH={run._ALIAS}:/mine " in invoke("-np", "2", "--horovod", "--dry-run", "train.py").output
    assert "PYTHONPATH" not in invoke("-np", "2", "--dry-run", "train.py").output


@pytest.mark.parametrize(
    "words, command",
    [
        (["train.py", "a"], [sys.executable, "train.py", "a"]),
        (["python", "train.py"], [sys.executable, "train.py"]),
        (["python3", "-m", "train"], [sys.executable, "-m", "train"]),
        (["-m", "train"], [sys.executable, "-m", "train"]),
        (["hostname"], ["hostname"]),
        (["/usr/bin/python3", "train.py"], ["/usr/bin/python3", "train.py"]),
    ],
)
def test_python_is_this_python(words, command):
    assert run.python_command(words) == command


@pytest.mark.parametrize("words", ["train.py", "-np 0 train.py", "-np 2", "-np 2 --timeout 0 train.py"])
def test_wrong_usage_is_refused(hydra, words):
    assert invoke(*words.split()).exit_code == 2


def test_a_missing_mpi_is_one_line(monkeypatch):
    def none(library=None, name=None):
        raise MPIMissingError("no MPI library could be loaded. Install one")

    monkeypatch.setattr(finding, "find_launcher", none)
    result = invoke("-np", "2", "train.py")
    assert result.exit_code == 1
    assert result.output == "Error: no MPI library could be loaded. Install one\n"


@pytest.mark.parametrize("status", [0, 1, 7, 255])
def test_the_exit_status_is_passed_on(status):
    assert supervise(["sh", "-c", f"exit {status}"], ENV) == status


def test_death_by_a_signal_is_told_as_a_shell_does():
    assert supervise(["sh", "-c", "kill -9 $$"], ENV) == 128 + signal.SIGKILL


@pytest.mark.parametrize("number, hint", [
    (signal.SIGKILL, "often out of memory"), (signal.SIGBUS, "/dev/shm is often full"),
], ids=["SIGKILL", "SIGBUS"])
@pytest.mark.parametrize("ends", ["kill -{} $$", "exit {}"], ids=["as a shell tells", "as Hydra tells"])
def test_a_signal_that_ends_ranks_is_explained(number, hint, ends, capsys):
    run._supervise(["sh", "-c", ends.format(int(number))], ENV, timeout_s=None, max_restarts=0)
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 1, 124, 130, 143])
def test_other_ends_are_not_explained(status, capsys):
    run._supervise(["sh", "-c", f"exit {status}"], ENV, timeout_s=None, max_restarts=0)
    assert capsys.readouterr().err == ""


def test_a_time_out_ends_the_child():
    start = time.monotonic()
    assert supervise(["sleep", "60"], ENV, timeout_s=0.2) == TIMED_OUT
    assert time.monotonic() - start < 5


def test_a_signal_is_forwarded(tmp_path):
    ready = tmp_path / "ready"
    program = "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); "
    program += f"pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"

    def send_when_ready():
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send_when_ready, daemon=True).start()
    before = signal.getsignal(signal.SIGTERM)
    assert supervise([sys.executable, "-c", program], ENV) == 9
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_before_the_child_is_there_ends_it(monkeypatch):
    start = subprocess.Popen

    def signalled(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return start(*arguments, **options)

    monkeypatch.setattr("horo_lite.cli.supervise.subprocess.Popen", signalled)
    assert supervise(["sleep", "60"], ENV) == 128 + signal.SIGTERM


LAUNCHER = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
if words == ["--version"]:
    sys.exit(print({banner!r}))
command = words[words.index(sys.executable):]
for rank in range({ranks}):
    seen = {{{variable!r}: str(rank), "OPTIONS": " ".join(words)}}
    status = subprocess.run(command, env={{**os.environ, **seen}}).returncode
sys.exit(status)
"""
RECORDS = """
import os, sys
names = ("{variable}", "I_MPI_PIN", "OMP_NUM_THREADS", "OPTIONS")
with open(sys.argv[1], "a") as file:
    print(*(os.environ.get(name) for name in names), sep="|", file=file)
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Installs a launcher's stand-in, and lets ``horo-lite run`` start a script with it; what each rank has seen."""

    def run_with(program: str, banner: str, variable: str, *words: str, status: int = 0) -> tuple[int, list[list[str]]]:
        folder = tmp_path / "bin"
        folder.mkdir()
        file = folder / program
        file.write_text(LAUNCHER.format(python=sys.executable, banner=banner, variable=variable, ranks=2))
        file.chmod(0o755)
        script, record = tmp_path / "train.py", tmp_path / "record"
        script.write_text(RECORDS.format(variable=variable))
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        monkeypatch.setattr(finding, "_search_path", lambda files: [str(folder)])
        monkeypatch.setattr(machine, "usable_cores", lambda: 4)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        result = invoke(*words, "-np", "2", str(script), str(record), str(status))
        return result.exit_code, [line.split("|") for line in record.read_text().splitlines()]

    return run_with


@pytest.mark.parametrize("status", [0, 7])
def test_from_the_command_line_to_ranks_that_srun_starts(start, status):
    ended, ranks = start("srun", "slurm 24.05.1", "SLURM_PROCID", "--launcher", "slurm", "--bind", status=status)
    assert ended == status
    assert [(rank, threads) for rank, _, threads, _ in ranks] == [("0", "2"), ("1", "2")]
    wanted = "--ntasks=2 --kill-on-bad-exit --label --cpus-per-task=2 --cpu-bind=cores "
    assert all(words.startswith(wanted) for *_, words in ranks)


@pytest.mark.parametrize("status", [0, 7])
def test_from_the_command_line_to_ranks_that_intel_mpi_starts(start, status, monkeypatch):
    library = finding.Library("Intel(R) MPI Library 2021.19 for Linux* OS", (), "4.1.2")
    monkeypatch.setattr(finding, "find_library", lambda: library)
    banner = "Intel(R) MPI Library for Linux* OS, Version 2021.19"
    ended, ranks = start("mpiexec.hydra", banner, "PMI_RANK", status=status)
    assert ended == status
    assert [(rank, pin, threads) for rank, pin, threads, _ in ranks] == [("0", "0", "2"), ("1", "0", "2")]
    assert all(words.startswith("-np 2 -prepend-rank ") for *_, words in ranks)


def test_a_program_of_that_name_that_is_another_is_not_started(start):
    with pytest.raises(FileNotFoundError):  # no rank has recorded anything
        start("srun", "a spin runner 1.0", "SLURM_PROCID", "--launcher", "slurm")


def noting(*names):
    """A command that leaves these files in the folder for ranks' notes, if there is one."""
    return ["sh", "-c", 'test -z "$HORO_LITE_UNDER_WAY_FOLDER" || cd "$HORO_LITE_UNDER_WAY_FOLDER" && touch done '
            + " ".join(names)]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "status", "says"),
    [
        ((), 0, ""), ((".nfs0001", "text"), 0, ""), (("1.234",), 1, "rank 1 ended"),
        (("2.7", "0.5"), 1, "ranks 0, 2 ended"),
    ],
)
def test_what_ranks_have_left_of_notes_is_looked_at_after_a_success(names, status, says, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run._supervise(noting(*names), ENV, timeout_s=None, max_restarts=0, notes=True) == status
    assert says in capfd.readouterr().err
    assert run._supervise(["sh", "-c", 'rm -r "$HORO_LITE_UNDER_WAY_FOLDER"'], ENV, None, 0, notes=True) == 0


def test_a_job_runs_where_no_folder_can_be_made(monkeypatch, tmp_path):
    def refuse(**options):
        raise PermissionError("read-only file system")

    monkeypatch.setattr(run.tempfile, "TemporaryDirectory", refuse)
    assert run._supervise(["sh", "-c", f"touch {tmp_path}/ran"], ENV, None, 0, notes=True) == 0
    assert (tmp_path / "ran").exists()


def test_the_folder_for_notes_is_that_of_the_rank_which_has_taken_it(monkeypatch):
    monkeypatch.setenv("HORO_LITE_RANK_PID", "")
    monkeypatch.setenv("HORO_LITE_UNDER_WAY_FOLDER", "/tmp/a:b")
    for _ in range(2):  # init() again
        assert Config.from_environment().under_way_folder == "/tmp/a:b"
        mark_rank()
    monkeypatch.setenv("HORO_LITE_UNDER_WAY_FOLDER", f"{os.getpid() + 1}:/tmp/a:b")
    for _ in range(2):
        assert Config.from_environment().under_way_folder == ""
        mark_rank()
