"""docs/troubleshooting.md lists what horo_lite says: every heading is provoked here, word for word."""

from __future__ import annotations

import re

import pytest

from tests.faults.jobs import LAUNCHER_GOES_ON, PREAMBLE, STALL, job
from tests.launch import ROOT, run_ranks

HEADINGS = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)

SLEEPS = "time.sleep(60) if rank == 1 else reduce('x')"
OUT_OF_STEP = """
from horo_lite.gradients import GradientBuckets
plans = [GradientBuckets([("w", (3,), "float32")], label=label) for label in ("first", "second")]
for plan in plans if rank else reversed(plans):
    plan.ready(0)
    plan.finish()
"""
WORKER = """
import multiprocessing
import horo_lite as hvd
hvd.init()
if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=print)
    worker.start()
    worker.join()
"""
BY_RANK = """
import os
rank = next(os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)
os.environ["HORO_LITE_BUCKET_BYTES"] = "1" + rank
"""
ANOTHER_LAUNCHER = """
import os
for name in [name for name in os.environ if name.startswith(("PMI", "OMPI"))]:
    del os.environ[name]
os.environ["PMI_SIZE"] = "2"
"""

LATE = """
import os, time
if "1" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
    time.sleep(4)
"""

PARENT_ENDS = """
import os, time
ready, tell = os.pipe()
if os.fork():
    os.read(ready, 1)
    os._exit(0)
"""

IN_HANDLER = """
signal.signal(signal.SIGALRM, lambda *_: reduce("x"))
signal.alarm(1)
reduce("y") if rank else time.sleep(9)
"""

# For each heading the job that provokes it: a script, and options of ``job``.
PROVOKED = {
    "… has waited for … s: rank … has not submitted it": (SLEEPS, {"env": STALL}),
    "… has waited for … s: rank … has finished": ("reduce('x') if rank == 0 else None", {"env": STALL}),
    "… has waited for … s: rank … has called shutdown()": (
        "reduce('x') if rank == 0 else hvd.shutdown()", {"env": STALL}
    ),
    "rank … is silent: it is stopped, cut off, or in code that keeps Python out": (
        "os.kill(os.getpid(), signal.SIGSTOP) if rank else reduce('x')", {"env": STALL}
    ),
    "The job ends now (HORO_LITE_STALL_ABORT_S is over; 0 is never)": (SLEEPS, {"env": STALL}),
    "ended by SIGTERM, while at": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", {}),
    "left with exit status …": ("sys.exit(3)", {}),
    "left by os._exit(…), at": ("os._exit(0) if rank else reduce('x')", {}),
    "… came to the end … s ago; the job ends once … there too": ("time.sleep(3) if rank else None", {"env": STALL}),
    "a signal handler or a finalizer called a collective": (IN_HANDLER, {}),
    "left for another program, …, at": ("os.execvp('true', ['true']) if rank else reduce('x')", {}),
    "rank … (process … of this node) has vanished without a word": (
        "os.kill(os.getpid(), signal.SIGKILL) if rank else reduce('x')", {"preamble": LAUNCHER_GOES_ON + PREAMBLE}
    ),
    "DisagreementError: tensor …: mismatched …: rank 0: …; rank 1: …": ("hvd.allreduce(np.ones(4 + rank))", {}),
    "DisagreementError: init(): ranks have different …": ("", {"preamble": BY_RANK + PREAMBLE}),
    "ranks are out of step": (OUT_OF_STEP, {}),
    "says that … started … processes, but in the MPI library … each is rank 0 of 1": (
        "", {"preamble": ANOTHER_LAUNCHER + PREAMBLE, "ranks": 1}
    ),
    "no MPI library could be loaded": ("", {"preamble": "import sys; sys.modules['mpi4py.MPI'] = None\n" + PREAMBLE}),
    "in init_waits_until_every_process_has_called_it": ("", {"preamble": LATE + PREAMBLE, "env": STALL}),
    "init() comes too late: MPI has been finalized": ("from mpi4py import MPI; MPI.Finalize(); hvd.init()", {}),
    "init() was called in a child process of multiprocessing": (WORKER, {}),
    "… ranks share … core": ("", {"ranks": 3}),
    "one process; to train on 4: horo-lite run -np 4 python …": ("", {"ranks": 1}),
    "Horovod has not been initialized; use hvd.init().": ("hvd.shutdown(); hvd.rank()", {"ranks": 1}),
    "the process that started this rank has ended, so the rank ends too": (
        "os.write(tell, b'.'); time.sleep(60)", {"preamble": PARENT_ENDS + PREAMBLE}
    ),
}


def test_every_heading_is_provoked():
    assert set(HEADINGS) == set(PROVOKED)


@pytest.mark.parametrize("heading", PROVOKED)
def test_the_message_is_what_the_page_says(heading, tmp_path):
    body, options = PROVOKED[heading]
    if body is WORKER:  # spawn needs a file to import
        script = tmp_path / "script.py"
        script.write_text(WORKER)
        done = run_ranks(script, 2)
    else:
        done = job(body, **options)
    assert re.search(re.escape(heading).replace("…", ".*"), done.output), done.output
    assert done.returncode is not None
