"""A rank that fails ends the job: with an error, within seconds, with its traceback last and tagged, with no orphan."""

from __future__ import annotations

import signal
import sys
import textwrap
import time
from typing import NamedTuple

import pytest

from tests.faults.jobs import (
    LAUNCHER_GOES_ON,
    PREAMBLE,
    assert_bad_end,
    assert_good_end,
    assert_says,
    job,
    tagged,
)
from tests.launch import SCALE, MpiJob, wait_until


class Fault(NamedTuple):
    """What rank 1 does while rank 0 is in an all-reduce, and what is seen of it."""

    body: str
    says: tuple[str, ...]
    code: int | None = None
    """The job's exit status where the launcher passes it on; None: any but 0."""


FAULTS = {
    "exception": Fault("raise ValueError('none')", (r"\[rank 1\] Traceback", r"\[rank 1\] ValueError: none"), 1),
    "chained exceptions": Fault(
        """
        try:
            {}["key"]
        except KeyError as error:
            raise RuntimeError("outer") from error
        """,
        (r"\[rank 1\] KeyError: 'key'", r"\[rank 1\] RuntimeError: outer"),
    ),
    "exception in a thread": Fault(
        """
        def work():
            raise KeyError("in a thread")
        threading.Thread(target=work, name="loader").start()
        time.sleep(60)
        """,
        (r"\[rank 1\] in thread loader", r"\[rank 1\] KeyError: 'in a thread'"),
    ),
    "exception while an operation is under way": Fault(
        "handle = hvd.allreduce_async(np.ones(3), name='a'); raise ValueError('half way')", ("half way",)
    ),
    "exception after shutdown": Fault(
        "threading.Thread(target=hvd.shutdown, daemon=True).start(); time.sleep(1); raise ValueError('late')", ("late",)
    ),
    "out of memory": Fault(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        np.ones(1 << 34)
        """,
        (r"\[rank 1\] .*MemoryError",),
    ),
    "sys.exit with a number": Fault("sys.exit(7)", (r"\[rank 1\] left with exit status 7", "sys.exit\\(7\\)|line"), 7),
    "sys.exit with a text": Fault("sys.exit('no data')", (r"\[rank 1\] no data",), 1),
    "sys.exit in a function, with a finally": Fault(
        """
        def main():
            try:
                sys.exit(5)
            finally:
                print("cleaned up", flush=True)
        main()
        """,
        ("cleaned up", "exit status 5"),
        5,
    ),
    "sys.exit with a negative number": Fault("sys.exit(-1)", ("exit status 255",), 255),
    "sys.exit with another object": Fault("sys.exit((1, 2))", (r"\[rank 1\] \(1, 2\)", "exit status 1"), 1),
    "exit": Fault("exit(4)", ("exit status 4",), 4),
    "quit": Fault("quit(4)", ("exit status 4",), 4),
    "KeyboardInterrupt": Fault(
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", (r"\[rank 1\] KeyboardInterrupt",), 130
    ),
    "KeyboardInterrupt in an operation": Fault(
        "threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start(); reduce('never')",
        (r"\[rank 1\] KeyboardInterrupt",), 130,
    ),
    "SIGTERM": Fault(
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", (r"\[rank 1\] ended by SIGTERM, while at",), 143
    ),
    "SIGKILL": Fault("os.kill(os.getpid(), signal.SIGKILL)", ()),
    "segmentation fault": Fault("import ctypes; ctypes.string_at(8)", ()),
    "abort in C": Fault("os.abort()", ()),
    "os._exit": Fault("os._exit(3)", (r"\[rank 1\] left by os\._exit\(3\), at",), 3),
    "os._exit(0) while others wait": Fault("os._exit(0)", (r"\[rank 1\] left by os\._exit\(0\), at",), 1),
    "os._exit in a thread": Fault(
        "threading.Thread(target=os._exit, args=(0,)).start(); time.sleep(60)", (r"\[rank 1\] left by os\._exit",), 1
    ),
    "os._exit after shutdown": Fault(
        "threading.Thread(target=hvd.shutdown, daemon=True).start(); time.sleep(1); os._exit(3)",
        (r"\[rank 1\] left by os\._exit\(3\)",), 3,
    ),
    "another program in its place": Fault(
        "os.execlp('sleep', 'sleep', '1')", (r"\[rank 1\] left for another program, .*sleep, at",), 1
    ),
    "failure in the transport": Fault("reduce('x')", ("injected",)),
    "no standard error": Fault("sys.stderr = None; raise ValueError('seen')", (r"\[rank 1\] ValueError: seen",), 1),
    "closed standard error": Fault("sys.stderr.close(); os.close(2); raise ValueError('unseen')", (), 1),
    "a text that has no encoding": Fault("raise ValueError('\\udcff')", (r"\[rank 1\] ValueError: \\udcff",), 1),
    "an error that has no text": Fault(
        """
        class Silent(Exception):
            def __str__(self):
                raise KeyError
        raise Silent
        """,
        (r"\[rank 1\] .*Silent: <exception str\(\) failed>",), 1,
    ),
    "endless recursion": Fault("def call(): call()\ncall()", (r"\[rank 1\] RecursionError",), 1),
    "in a coroutine": Fault(
        """
        import asyncio
        async def work():
            raise ValueError("awaited")
        asyncio.run(work())
        """,
        (r"\[rank 1\] ValueError: awaited",), 1,
    ),
    "a hook set over ours": Fault(
        "sys.excepthook = lambda kind, error, trace: print('a library:', error, flush=True); raise ValueError('seen')",
        ("a library: seen", r"\[rank 1\] ValueError: seen"), 1,
    ),
    "a hook of the program's own": Fault(
        "raise ValueError('seen by both')", ("my hook: seen by both", r"\[rank 1\] ValueError: seen by both")
    ),
}
ALSO_ON_OPEN_MPI = {"exception", "exception in a thread", "sys.exit with a number", "SIGTERM", "SIGKILL", "os._exit",
                    "os._exit(0) while others wait"}

VARIANTS = {
    "sys.exit with a negative number", "sys.exit with another object", "quit", "KeyboardInterrupt", "abort in C",
    "os._exit in a thread", "closed standard error", "an error that has no text", "endless recursion",
}
"""Others show the same way to end."""


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.openmpi] * (name in ALSO_ON_OPEN_MPI) + [pytest.mark.slow] * (name in VARIANTS)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in FAULTS])
def test_a_failing_rank_ends_the_job(name):
    fault = FAULTS[name]
    env = {"HORO_LITE_TEST_FAULT": "1:1:lose"} if name == "failure in the transport" else {}
    preamble = PREAMBLE
    if name == "a hook of the program's own":
        hook = "import sys; sys.excepthook = lambda kind, error, trace: print('my hook:', error, flush=True)\n"
        preamble = hook + PREAMBLE
    body = textwrap.indent(textwrap.dedent(fault.body).strip(), "    ")
    done = job(f"if rank == 1:\n{body}\nreduce('next')\ntime.sleep(60)\n", preamble=preamble, env=env)
    assert_bad_end(done, *fault.says)
    if fault.code is not None:
        assert done.returncode == fault.code
    if fault.says:
        assert tagged(done)[-1].startswith("[rank 1]"), "the rank that failed has the last word"


@pytest.mark.openmpi
@pytest.mark.parametrize("where", ["time.sleep(60)", "reduce('x')", "pass"], ids=["idle", "waiting", "at its end"])
def test_a_rank_that_vanishes_unseen_by_the_launcher_is_missed_by_its_neighbour(where):
    body = f"if rank == 1:\n    time.sleep(0.5)\n    os.kill(os.getpid(), signal.SIGKILL)\n{where}"
    done = job(body, ranks=3, preamble=LAUNCHER_GOES_ON + PREAMBLE)
    assert_bad_end(done, r"\[rank 0\] rank 1 \(process \d+ of this node\) has vanished", "out of memory")


def test_all_ranks_failing_at_once_end_the_job():
    assert_bad_end(job("raise ValueError(f'on rank {rank}')", ranks=4), r"ValueError: on rank \d")


def test_the_same_with_mpi_initialised_by_the_program():
    done = job("raise ValueError('mine') if rank == 1 else reduce('x')", preamble="from mpi4py import MPI\n" + PREAMBLE)
    assert_bad_end(done, r"\[rank 1\] ValueError: mine")


@pytest.mark.parametrize("body", [
    pytest.param("reduce('x')\nfrom mpi4py import MPI\nMPI.Finalize()", id="finalised by the program"),
    pytest.param("reduce('x')\nhvd.shutdown()\nhvd.init()\nreduce('y')", id="initialised again"),
    pytest.param("hvd.shutdown()\nfrom mpi4py import MPI\nMPI.Finalize()", id="shut down, then finalised"),
    pytest.param("import atexit\natexit.register(lambda: print(rank))\nsys.exit(0)", id="sys.exit(0)"),
    pytest.param("reduce('x')\nfrom mpi4py import MPI\nsys.exit(256)", id="sys.exit(256), which a system sees as 0"),
    pytest.param(
        "reduce('x')\nhvd.shutdown()\nos._exit(0) if rank else time.sleep(1)", id="os._exit(0) after shutdown"
    ),
    pytest.param(
        "hvd.shutdown()\nthreads = [threading.Thread(target=hvd.init) for _ in range(3)]\n"
        "[thread.start() for thread in threads]\n[thread.join() for thread in threads]\nreduce('x')",
        id="init() in three threads at once",
    ),
    pytest.param("import atexit\natexit.register(lambda: 1 / 0)\nreduce('x')", id="an error in an exit hook"),
    pytest.param("import atexit\natexit.register(lambda: reduce('y'))", id="an operation in an exit hook"),
    pytest.param("try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass\nreduce('x')", id="an error caught"),
    pytest.param(
        "try:\n    sys.exit(3)\nexcept SystemExit as leave:\n    assert leave.code == 3\nreduce('x')",
        id="sys.exit caught",
    ),
    pytest.param(
        "threading.Thread(target=lambda: sys.exit(3)).start()\nreduce('x')", id="sys.exit in a thread ends the thread"
    ),
])
def test_a_good_end_stays_good(body):
    assert_good_end(job(body))


BUSY = pytest.param("while True: pass", marks=pytest.mark.slow)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize("at", [BUSY, "[reduce('x') for _ in range(10**9)]", "time.sleep(99)"])
@pytest.mark.openmpi
def test_no_rank_outlives_mpirun(number, at):
    running = MpiJob([sys.executable, "-c", f"{PREAMBLE}print('ready', flush=True)\n{at}"], ranks=2)
    try:
        wait_until(lambda: running.output().count("ready") == 2, time.monotonic() + 60 * SCALE)
        running.process.send_signal(number)
        assert running.wait(10 * SCALE) not in (None, 0), running.output()
        wait_until(lambda: not running.survivors(), time.monotonic() + 5 * SCALE)
        assert not running.survivors()
    finally:
        running.kill()


@pytest.mark.openmpi
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forked_child_ends_by_itself(ranks):
    """However it ends; in an ordinary end mpi4py would finalise the MPI of its parent."""
    body = """
    def fails():
        raise ValueError("in the child")
    ways = {lambda: None: 0, lambda: sys.exit(3): 3, lambda: sys.exit("a text"): 1, fails: 1, lambda: os._exit(4): 4}
    for way, status in ways.items():
        child = os.fork()
        if child == 0:
            break
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    if child == 0:
        print("written", end="")  # and not flushed
        way()
    else:
        assert reduce("x")[0] == size
        print("right", flush=True)
    """
    done = job(body, ranks=ranks)
    assert_good_end(done, "ValueError: in the child", "a text")
    assert done.output.count("right") == ranks
    assert done.output.count("written") == 4 * ranks  # os._exit flushes nothing


def test_a_signal_to_a_forked_child_ends_the_child_alone():
    body = """
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.5)
    os.kill(child, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    reduce("x")
    """
    assert_good_end(job(body))


def test_a_signal_handler_of_the_program_stays():
    preamble = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('saving', flush=True))\n" + PREAMBLE
    done = job("os.kill(os.getpid(), signal.SIGTERM)\nreduce('x')", preamble=preamble)
    assert_good_end(done, "saving")


def test_one_process_fails_as_any_other():
    done = job("raise ValueError('alone')", ranks=1)
    assert_says(done, "ValueError", "alone")  # Python writes them apart, and a launcher may put its tag between them
    assert not tagged(done)
    assert done.returncode == 1
