"""How a job was started: other MPIs' launchers, children of ranks, workers, thread levels, settings that differ."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.faults.jobs import (
    PREAMBLE,
    STALL,
    assert_bad_end,
    assert_good_end,
    assert_says,
    job,
    needs,
)
from tests.launch import ROOT, SCALE, launcher, run_ranks

OWN_RANK = "import os\nrank = int(next(os.environ[v] for v in ('PMI_RANK', 'PMIX_RANK') if v in os.environ))\n"
INIT = "import horo_lite as hvd; hvd.init(); print('size', hvd.size())"


def alone(code: str = INIT, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """One process without a launcher."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI_COMM", "SLURM"))}
    env.update(variables, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60 * SCALE)


@pytest.mark.parametrize("variable, launcher", [
    ("PMI_SIZE", "mpirun of MPICH or Intel MPI"),
    ("OMPI_COMM_WORLD_SIZE", "mpirun of Open MPI"),
    ("SLURM_STEP_NUM_TASKS", "srun --mpi=pmi"),
])
@pytest.mark.openmpi
def test_a_launcher_of_another_mpi_is_found_out(variable, launcher):
    done = alone(**{variable: "2"})
    assert done.returncode == 1
    assert f"LaunchError: {variable}=2 says that" in done.stderr
    assert launcher in done.stderr
    assert "horo-lite run" in done.stderr and "HORO_LITE_ALLOW_SINGLE=1" in done.stderr


def test_the_override_lets_one_process_go_on():
    assert alone(PMI_SIZE="2", HORO_LITE_ALLOW_SINGLE="1").stdout == "size 1\n"


def test_an_allocation_alone_does_not_stop():
    assert alone(SLURM_NTASKS="2").stdout == "size 1\n"


@pytest.mark.openmpi
def test_one_process_is_told_how_to_start_more():
    done = alone()
    assert done.stdout == "size 1\n"
    assert done.stderr.count("\n") == 1 and "horo-lite run -np 4 python" in done.stderr


def test_a_notebook_is_told_how_to_start_more():
    assert "horo_lite.run(function, np=4)" in alone("import sys; sys.modules['ipykernel'] = None; " + INIT).stderr


NO_MPI = "import sys; sys.modules['mpi4py.MPI'] = None; "  # importing it raises ImportError


def test_no_mpi_library():
    done = alone(NO_MPI + INIT)
    assert "MPIMissingError" in done.stderr and "pip install" in done.stderr
    assert done.returncode == 1


def test_no_mpi_library_and_an_import():
    assert alone(NO_MPI + "import horo_lite; print(horo_lite.__version__)").returncode == 0


def test_a_damaged_mpi_library():
    broken = "import mpi4py, sys\nclass Broken:\n    def find_spec(self, name, path=None, target=None):\n"
    broken += "        if name == 'mpi4py.MPI': raise RuntimeError('cannot load MPI library')\n"
    done = alone(broken + "sys.meta_path.insert(0, Broken())\nimport horo_lite as hvd\nhvd.init()")
    assert "MPIMissingError" in done.stderr and "cannot load MPI library" in done.stderr


@pytest.mark.openmpi
def test_a_child_of_a_rank_is_a_world_of_its_own():
    done = job("""
        code = "import horo_lite as hvd; hvd.init(); print('child of size', hvd.size())"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
        reduce("x")
    """)
    assert_good_end(done)
    assert done.output.count("child of size 1") == 2


WORKERS = """
import multiprocessing, sys
import horo_lite as hvd

method, guarded = sys.argv[1:]
if __name__ == "__main__" or guarded == "unguarded":
    hvd.init()

def work():
    print("worked", flush=True)

if __name__ == "__main__":
    worker = multiprocessing.get_context(method).Process(target=work)
    worker.start()
    worker.join()
    hvd.barrier()
"""


@pytest.fixture
def workers(tmp_path):
    script = tmp_path / "script.py"  # a file: spawn imports it
    script.write_text(WORKERS)
    return script


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_processes(method, workers):
    done = run_ranks(workers, 2, method, "guarded")
    assert_good_end(done)
    assert done.output.count("worked") == 2


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_init_in_a_worker_is_refused(method, workers):
    done = run_ranks(workers, 2, method, "unguarded")
    assert_good_end(done, r"LaunchError: init\(\) was called in a child process", "if __name__ == ")
    assert "worked" not in done.output


@pytest.mark.openmpi
@pytest.mark.parametrize("level", ["single", "funneled", "serialized"])
def test_thread_levels_below_multiple_work(level):
    preamble = f"import mpi4py\nmpi4py.rc.thread_level = {level!r}\n" + PREAMBLE
    done = job("""
        handle = hvd.allreduce_async(np.ones(3), op=hvd.Sum, name="a")
        assert hvd.synchronize(handle)[0] == 2
        assert reduce("x")[0] == 2
    """, preamble=preamble)
    assert_good_end(done)


@pytest.mark.parametrize("level", ["SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE"])
def test_mpi_initialised_by_the_program_at_any_level(level):
    preamble = "import mpi4py\nmpi4py.rc.initialize = False\nfrom mpi4py import MPI\n"
    preamble += f"MPI.Init_thread(MPI.THREAD_{level})\n"
    done = job("""
        from horo_lite.gradients import GradientBuckets
        buckets = GradientBuckets([("w", (3,), "float32")], op=hvd.Sum)
        for step in range(3):
            buckets.views[0][:] = rank + 1
            buckets.ready(0)
            assert buckets.finish() == [True]
            assert (buckets.views[0] == 3).all()
        print("threads", hvd.mpi_threads_supported())
        hvd.shutdown()
        MPI.Finalize()
    """, preamble=preamble + PREAMBLE)
    assert_good_end(done, f"threads {level == 'MULTIPLE'}")


@pytest.mark.parametrize("level", ["single", pytest.param("funneled", marks=pytest.mark.slow), "serialized"])
@pytest.mark.parametrize("fault, says", [
    ("raise ValueError('here')", r"\[rank 1\] ValueError: here"),
    ("sys.exit(3)", r"\[rank 1\] left with exit status 3"),
    ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", r"\[rank 1\] ended by SIGTERM"),
])
def test_a_failing_rank_ends_the_job_at_any_level(level, fault, says):
    preamble = f"import mpi4py\nmpi4py.rc.thread_level = {level!r}\n" + PREAMBLE
    done = job(f"if rank == 1:\n    {fault}\nreduce('x')\ntime.sleep(60)", preamble=preamble)
    assert_bad_end(done, says)


def test_init_after_mpi_was_finalized():
    done = job("""
        from mpi4py import MPI
        MPI.Finalize()
        for call in (lambda: reduce("x"), hvd.init):
            try:
                call()
            except Exception as error:
                print(type(error).__name__, error)
    """)
    assert_good_end(done, "NotInitializedError", r"LaunchError init\(\) comes too late")


@pytest.mark.parametrize("end", ["raise ValueError('early')", "os._exit(0)", "time.sleep(60)"])
def test_a_rank_that_never_comes_to_init_ends_the_job(end):
    """MPICH's launcher waits for it for ever; others end the job at once if it has ended."""
    impatient = "import os, time, horo_lite.launch_check\nhoro_lite.launch_check._LEAST_INIT_S = 0\n"
    by_rank = "if '1' in (os.environ.get('PMI_RANK'), os.environ.get('PMIX_RANK')):\n    " + end + "\n"
    done = job("", preamble=impatient + by_rank + PREAMBLE, env=STALL)
    assert_bad_end(done)
    if launcher().name == "mpich" or "sleep" in end:
        assert_says(done, "Timeout .0:00:01", "in init_waits_until_every_process_has_called_it", "signal 14")


def test_a_stall_without_threads_is_reported_by_the_waiting_rank_alone():
    preamble = "import mpi4py\nmpi4py.rc.thread_level = 'single'\n" + PREAMBLE
    done = job("time.sleep(60) if rank == 1 else reduce('x')", preamble=preamble, env=STALL)
    assert_bad_end(done, "tensor 'x' has waited", "MPI_THREAD_MULTIPLE")


def test_more_ranks_than_cores_is_said_once():
    ranks = len(os.sched_getaffinity(0)) + 1
    done = job("reduce('x')", ranks=ranks, limit_s=60)
    assert_good_end(done, rf"{ranks} ranks share \d+ core")
    assert done.output.count("ranks share") == 1


@pytest.mark.parametrize("variable, values", [
    ("HORO_LITE_BUCKET_BYTES", ("1000", "2000")),
    ("HORO_LITE_ALGORITHM", ("ring", "auto")),
    ("HORO_LITE_CHUNK_ELEMENTS", ("1000", "2000")),
])
def test_settings_that_differ_are_found_at_init(variable, values):
    by_rank = OWN_RANK + f"os.environ[{variable!r}] = {values}[rank]\n"
    done = job("", preamble=by_rank + PREAMBLE)
    assert_bad_end(done, f"DisagreementError: init.*{variable}: .* on rank 0; .* on rank 1")


def test_versions_that_differ_are_found_at_init():
    by_rank = OWN_RANK + "import horo_lite.launch_check as check\ncheck.__version__ = f'1.{rank}'\n"
    done = job("", preamble=by_rank + PREAMBLE)
    assert_bad_end(done, "different versions of horo_lite: 1.0 on rank 0; 1.1 on rank 1")


@pytest.mark.parametrize("variable", ["HORO_LITE_STALL_WARN_S", "HORO_LITE_BUCKET_BYTES", "HOROVOD_FUSION_THRESHOLD"])
def test_a_setting_that_cannot_be_read_is_named(variable):
    done = alone(**{variable: "many"})
    assert f"{variable}='many'" in done.stderr


@pytest.mark.parametrize("home", [None, "/proc"])
def test_no_home_and_a_home_that_cannot_be_written(home):
    done = job("reduce('x')", env={"HOME": home})
    if "Unable to get the user home directory" in done.output:
        pytest.skip("Open MPI's launcher does not start without a home")
    assert_good_end(done)


@needs("torch")
def test_threads_follow_the_cores_unless_the_user_has_set_them():
    body = "import torch\nhvd.shutdown()\nhvd.init()\nprint('threads', torch.get_num_threads())"
    cores = len(os.sched_getaffinity(0))
    done = job(body, env={"OMP_NUM_THREADS": None}, limit_s=120)
    assert_good_end(done)
    assert_says(done, f"threads {max(1, cores // 2)}")
