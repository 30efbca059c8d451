"""``horo-lite run`` with the MPI that is installed."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from horo_lite.cli import launchers
from tests.faults.jobs import needs
from tests.launch import ROOT, SCALE, child_environment, launcher, wait_until

pytestmark = pytest.mark.openmpi


def horo_lite(*words: str, limit_s: float = 60.0, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "horo_lite.cli", *words]
    # Unbuffered, Python writes a line and its end apart, and launchers mix them before init().
    env = {name: value for name, value in child_environment().items() if name != "PYTHONUNBUFFERED"} | variables
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s * SCALE)


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


def runs(pid: str) -> bool:
    """False for a zombie too: its parent may be gone before it."""
    with contextlib.suppress(FileNotFoundError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


RANK = "from mpi4py import MPI; rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size\n"


@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_see_one_another_and_lines_carry_their_rank(script, ranks):
    done = horo_lite("run", "-np", str(ranks), script(RANK + "print(f'{rank} of {size}', flush=True)"))
    assert done.returncode == 0, done.stderr
    lines = sorted(re.findall(r"^\[(\d)\].*?(\d) of (\d)$", done.stdout, re.MULTILINE))
    assert lines == [(str(rank), str(rank), str(ranks)) for rank in range(ranks)]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_lines_of_ranks_that_write_each_word_at_once_stay_whole(script, stream):
    text = (
        "import sys, horo_lite as hvd; hvd.init(); rank = hvd.rank()\n"
        f"for i in range(100): print('line', i, 'of', rank, file=sys.{stream})\n"
    )
    done = horo_lite("run", "-np", "4", script(text), PYTHONUNBUFFERED="1", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^\[(\d)\].*?line (\d+) of (\d)$", getattr(done, stream), re.MULTILINE)
    assert sorted(lines) == sorted((str(rank), str(i), str(rank)) for rank in range(4) for i in range(100))


def test_the_exit_status_of_a_failing_rank_is_the_jobs(script):
    text = RANK + "MPI.COMM_WORLD.Abort(5) if rank == 1 else MPI.COMM_WORLD.barrier()"
    done = horo_lite("run", "-np", "2", script(text))
    assert done.returncode == 5


@pytest.mark.parametrize(("ranks", "culprit"), [(2, 1), (2, 0), (3, 1)])
def test_exit_in_c_code_is_no_success(script, ranks, culprit):
    text = (
        "import ctypes, numpy as np, horo_lite as hvd\nhvd.init()\n"
        f"if hvd.rank() == {culprit}: ctypes.CDLL(None).exit(0)\n"
        "hvd.allreduce(np.ones(3))"
    )
    done = horo_lite("run", "-np", str(ranks), script(text))
    assert done.returncode not in (0, 124), done.stderr


@pytest.mark.parametrize("end", ["", "import sys; sys.exit(0)", "hvd.shutdown(); import os; os._exit(0)",
                                 "from mpi4py import MPI; MPI.Finalize()", "hvd.shutdown(); hvd.init()"])
def test_an_orderly_end_is_a_success(script, end):
    started = (
        "import subprocess, sys, numpy as np, horo_lite as hvd\nhvd.init()\nhvd.allreduce(np.ones(3))\n"
        "alone = 'import os, horo_lite as hvd; hvd.init(); os._exit(0)'\n"
        "import os; env = {k: v for k, v in os.environ.items() if not k.startswith(('PMI', 'OMPI', 'PRTE'))}\n"
        "subprocess.run([sys.executable, '-c', alone], env=env, check=True)\n"
    )
    done = horo_lite("run", "-np", "2", script(started + end))
    assert done.returncode == 0, done.stderr


INNER = """
import os, signal, sys, time
import horo_lite as hvd
hvd.init()
hvd.shutdown()
hvd.init()
open(f"{sys.argv[1]}/{hvd.rank()}", "w").close()
time.sleep(60)
"""
OUTER = """
import os, subprocess, sys, time
import horo_lite as hvd
hvd.init()
hvd.shutdown()
hvd.init()
if hvd.rank() == 0:
    launchers = ("PMI", "OMPI_COMM", "OMPI_MCA_ess", "PRTE_MCA_ess", "OMPI_MCA_orte_ess", "HYDI", "MPIR", "MPI_LOCAL")
    env = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    command = open(sys.argv[1]).read().split("\\n")
    job = subprocess.Popen(command, env=env, start_new_session=True)
    while len(os.listdir(command[-1])) < 2:
        time.sleep(0.1)
    job.kill()
    job.wait()
hvd.barrier()
"""


def test_a_job_that_a_rank_has_started_and_killed_is_no_failure_of_this_one(script, tmp_path, monkeypatch):
    inner, started = tmp_path / "inner.py", tmp_path / "started"
    inner.write_text(INNER)
    started.mkdir()
    job = launchers.Job([sys.executable, str(inner), str(started)], 2, cores=2)
    for name, value in launcher().environment(job).items():
        monkeypatch.setenv(name, value)
    command = tmp_path / "command"  # among the arguments prterun would take the inner one's options for its own
    command.write_text("\n".join(launcher().command(job)))
    done = horo_lite("run", "-np", "2", script(OUTER), str(command))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(started.iterdir())) == 2


def test_a_job_is_ended_when_its_time_is_up(script):
    start = time.monotonic()
    done = horo_lite("run", "-np", "2", "--timeout", "2", script("import time; time.sleep(100)"))
    assert done.returncode == 124
    assert "after 2 s (--timeout)" in done.stderr
    assert time.monotonic() - start < 20 * SCALE


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job(script, tmp_path, number):
    pids = tmp_path / "pids"
    text = f"import os, time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(100)"
    command = [sys.executable, "-m", "horo_lite.cli", "run", "-np", "2", script(text)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        until = time.monotonic() + 30 * SCALE
        while not (pids.exists() and pids.read_text().count("\n") == 2) and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(number)
        status = process.wait(20 * SCALE)
    assert status != 0
    wait_until(lambda: not any(map(runs, pids.read_text().split())), time.monotonic() + 5 * SCALE)
    assert not [pid for pid in pids.read_text().split() if runs(pid)]


def test_a_killed_horo_lite_leaves_no_process(script, tmp_path):
    pids = tmp_path / "pids"
    text = f"import os, time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(100)"
    command = [sys.executable, "-m", "horo_lite.cli", "run", "-np", "2", script(text)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as process:
        wait_until(lambda: pids.exists() and pids.read_text().count("\n") == 2, time.monotonic() + 30 * SCALE)
        process.kill()
    assert pids.read_text().count("\n") == 2
    wait_until(lambda: not any(map(runs, pids.read_text().split())), time.monotonic() + 10 * SCALE)
    assert not [pid for pid in pids.read_text().split() if runs(pid)]


def test_a_reader_that_goes_away_ends_the_job(script):
    """``| head -1``: the next line that a rank prints finds nobody."""
    text = RANK + "import time\nwhile True:\n    print('line', flush=True)\n    time.sleep(0.05)"
    command = [sys.executable, "-m", "horo_lite.cli", "run", "-np", "2", "--timeout", "60", script(text)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert "line" in process.stdout.readline()
        process.stdout.close()
        status = process.wait(30 * SCALE)
    assert status not in (0, 124)


@needs("torch")
def test_a_horovod_script_runs_unchanged(script):
    text = "import horovod, horovod.torch as hvd\nhvd.init()\nprint(hvd.rank(), 'of', hvd.size(), horovod.__name__)"
    done = horo_lite("run", "-np", "2", "--horovod", script(text))
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"\d of 2", done.stdout)) == 2
