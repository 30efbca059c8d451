"""docs/troubleshooting.md lists what horo_lite says: every message is provoked here, word for word."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import NamedTuple

import pytest

from tests.faults.jobs import LAUNCHER_GOES_ON, PREAMBLE, STALL, assert_says, job, needs
from tests.launch import ROOT, SCALE, child_environment, launcher, run_ranks
from tests.troubleshooting_page import HEADINGS, MPI_ROWS, ROWS, pattern

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



class Several(NamedTuple):
    """One job that provokes several messages, and catches what is raised."""

    body: str
    messages: tuple[str, ...]
    options: dict[str, object] = {}  # noqa: RUF012
    marks: tuple[pytest.MarkDecorator, ...] = ()


SHOWN = """
import contextlib, io, warnings
warnings.simplefilter("always")

@contextlib.contextmanager
def shown():
    try:
        yield
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""

CALLS = SHOWN + """
from horo_lite.compression import Compression
from horo_lite.gradients import GradientBuckets

with shown():
    hvd.reducescatter(np.ones(()) if rank else np.ones(4), name="fault", op=hvd.Sum)
with shown():
    GradientBuckets([("w", (3 + rank,), "float32")], label="optimizer").finish()
hvd.shutdown()
hvd.init(process_sets="dynamic")
with shown():
    hvd.add_process_set([rank])
with shown():
    hvd.add_process_set([0, 1, 9] if rank else [0, 1, 1])
with shown():
    hvd.join() if rank else hvd.broadcast(np.ones(3), 1, name="b")
if rank == 0:
    hvd.join()

class Broken:
    name = "broken"
    def reduce(self, gradients, state, group):
        raise ArithmeticError("none today")

with shown():
    hvd.allreduce(np.ones(4, np.float32), name="c", compression=Broken())
for _ in range(4):
    hvd.allreduce(np.ones(4, np.float32), name="d", compression=Compression.auto(trials=1))
shapes = [("w", (32,), "float32"), ("b", (32,), "float32")]
buckets = GradientBuckets(shapes, label="optimizer", overlap=True, bucket_bytes=64)
for index in range(2 - rank):
    buckets.ready(1 - index)
with shown():
    buckets.finish(failed=rank == 1)
child = os.fork()
if not child:
    with shown():
        reduce("x")
    os._exit(0)
os.waitpid(child, 0)

tries = []

@hvd.elastic.run
def train(state):
    tries.append(1)
    if len(tries) == 1:
        raise hvd.HorovodInternalError("a failed operation")

train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=0))

def wait():
    with shown():
        reduce(f"left by {rank}")

waits = threading.Thread(target=wait)
waits.start()
time.sleep(0.5)
hvd.shutdown()
waits.join()
"""

OWN_FAULTS = SHOWN + """
from horo_lite import context
parts = context.current()
parts.watch._lanes = lambda: 1 / 0
time.sleep(1)
type(parts.engine.lanes[0]).progress = lambda lane: 1 / 0
with shown():
    reduce("x")
os.abort()
"""

JOINED = SHOWN + """
from horo_lite.gradients import GradientBuckets
with shown():
    if rank:
        hvd.join()
    else:
        GradientBuckets([("w", (3,), "float32")], label="late").finish()
os._exit(1)
"""

NO_ROOM = """
import errno, os
def full(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")
os.posix_fallocate = full
"""

ONE_CORE = """
import os
number = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(number)]})
os.cpu_count = lambda: 8
"""

ALL_CORES = """
import os
os.sched_setaffinity(0, range(os.cpu_count()))
"""

TORCH = SHOWN + """
import torch
import horo_lite.torch as hvd

model = torch.nn.Linear(3, 1)
with shown():
    hvd.broadcast_parameters({"w": torch.ones(3 + rank)}, root_rank=0)
with torch.no_grad():
    model.weight.fill_(rank)
with shown():
    hvd.check_consistency(model)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.check_shards(list(range(4 + rank)))
hvd.check_shards(list(range(4)))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), 0.1), named_parameters=model.named_parameters(), backward_passes_per_step=2
)
for _ in range(9):
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
model(torch.ones(1, 3)).sum().backward()
optimizer.synchronize()
optimizer.step()
with shown():
    hvd.save_checkpoint("/dev/null/model.pt", model, optimizer)
with shown():
    hvd.recv(torch.ones(4), 0) if rank else hvd.send(torch.ones(3), 1)
"""

KERAS = SHOWN + """
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras
import tensorflow as tf
import horo_lite.keras as hvd
from horo_lite.keras import data

def network(units=1, **options):
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(units)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options), "mse", jit_compile=units == 2)
    return model

model = network()
model.layers[0].kernel.assign(np.full((2, 1), rank + 1.0))
with shown():
    hvd.check_consistency(model.weights)
data.check_shards(tf.data.Dataset.range(4).batch(2))
data.check_shards(tf.data.Dataset.range(4 + 4 * rank).batch(2))
with shown():
    hvd.save_model(model, "/dev/null/model.keras")
with shown():
    hvd.broadcast_variables([tf.Variable(tf.ones(2 + rank))], root_rank=0)
x, y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
stop = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: setattr(model, "stop_training", rank == 1))
validation = (x, y) if rank else None
model.fit(x, y, epochs=2, verbose=0, validation_data=validation, callbacks=[
    hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(), stop,
    hvd.callbacks.EarlyStoppingAgreementCallback(),
])
two = network(2)
two.fit(x, np.ones((4, 2)), epochs=1, verbose=0)
three = network(1, compression=hvd.Compression.topk(0.5))
three.fit(x, y, verbose=0)
path = os.environ["HORO_LITE_TEST_SAID"] + ".keras"
if rank == 0:
    three.save(path)
hvd.load_model(path, root_rank=0, compression=hvd.Compression.topk(0.5))
if rank == 0:
    os.unlink(path)
"""

SEVERAL = {
    "calls": Several(CALLS, (
        "tensor …: rank … could not take part: …", "rank … could not take part: …",
        "ranks differ in what they reduce: …", "every rank must register the same process set: …",
        "rank … could not register a process set: …",
        "rank … is its root but has called join(): it has nothing to send", "tensor … failed on this rank: …",
        "a backward pass failed midway on …", "process … was forked from rank … and is no rank itself",
        "going back to the last commit: …", "compression of …: chose …", "was still under way at shutdown()",
    )),
    "a plan after join": Several(JOINED, (
        "has called join(), but another rank is at …, which this rank can't follow",
    )),
    "a failure in MPI": Several("for _ in range(9): reduce('x')", ("failed in the MPI library",), {
        "env": {"HORO_LITE_TEST_FAULT": "1:9:lose"}}),
    "faults of our own": Several(OWN_FAULTS, ("the stall watch has failed", "the engine failed: …")),
    "no room": Several("reduce('x'); hvd.allreduce(np.ones(3_000_000))", ("this node's ranks share no memory: …",), {
        "preamble": NO_ROOM + PREAMBLE}),
    "a full disk": Several("reduce('x')", ("the timeline ends here: …",), {
        "preamble": "import os\nos.environ['HORO_LITE_TIMELINE'] = '/dev/full'\n" + PREAMBLE}),
    "one core each": Several("", ("each rank is bound to one core of …",), {"preamble": ONE_CORE + PREAMBLE}),
    "threads unset": Several("", ("… ranks on … cores: OMP_NUM_THREADS=… suits each of them",), {
        "preamble": ALL_CORES + PREAMBLE, "env": {"OMP_NUM_THREADS": None}}),
    "torch": Several(TORCH, (
        "ranks have different tensors (…); first difference: …", "check_consistency: … differs from rank …",
        "ranks have different numbers of batches", "every rank goes through the same samples",
        "step() came after … of backward_passes_per_step=… backward passes",
        "optimizer.step() called without optimizer.skip_synchronize() context",
        "save_checkpoint(…) failed on rank 0: …", "expected … […], but … […] was sent",
    ), {"limit_s": 60.0}, (needs("torch"),)),
    "keras": Several(KERAS, (
        "ranks have different variables: …", "variable … differs between ranks: …",
        "begins with the same batch as rank …", "save_model(…) failed on rank 0: …",
        "MetricAverageCallback: … is not on all ranks", "is trained without XLA",
        "another rank stops training after epoch …, so this one does too",
        "what compression had left unsent on rank … begins anew",
    ), {"limit_s": 120.0}, (needs("keras", "tensorflow"), pytest.mark.slow)),
}

RUN = ["-m", "horo_lite.cli", "run"]
SHELL = [*RUN, "-np", "1", "sh", "-c"]
IN_C = "import ctypes, horo_lite as hvd; hvd.init(); ctypes.CDLL(None).exit(0) if hvd.rank() else hvd.barrier()"

# What a command says, given to this Python.
COMMANDS = {
    "the job was ended after … s (--timeout)": [*RUN, "-np", "1", "--timeout", "1", "sleep", "60"],
    "the job ended with status …; start … of … in … s": [*RUN, "-np", "1", "--max-restarts", "1", "false"],
    "launcher … was asked for": [*RUN, "-np", "1", "--launcher", "none", "true"],
    "no … that belongs to … was found": [*RUN, "-np", "1", "--launcher", "slurm", "true"],
    "rank… … ended in the middle, though the launcher reports success": [*RUN, "-np", "2", "python", "-c", IN_C],
    "status …: if a rank was killed (SIGKILL), it was often out of memory": [*SHELL, "kill -9 $$"],
    "status …: if it was a bus error, /dev/shm is often full": [*SHELL, "kill -7 $$"],
    "without effect here: …": [*RUN, "-np", "1", "--tcp", "true"],
    "run(…): the job ended with status …": ["-c", "import horo_lite; horo_lite.run(lambda: 1 / 0, np=1)"],
}

# Said where other tests have the means: the file, and what it looks for.
ELSEWHERE = {
    "another rank has a gradient for …, which this rank's … was traced without": (
        "mpi/test_keras_jax.py", "another rank has a gradient for"
    ),
    "this launcher starts as many ranks on one host as on another": (
        "unit/test_cli_launchers.py", "as many ranks on one host"
    ),
    "no launcher is known for it": ("unit/test_cli_launchers.py", "no launcher is known"),
}


def test_every_message_is_provoked():
    assert set(HEADINGS) == set(PROVOKED)
    several = [message for each in SEVERAL.values() for message in each.messages]
    assert set(ROWS) == {*several, *COMMANDS, *ELSEWHERE}
    for file, text in ELSEWHERE.values():
        assert text in (ROOT / "tests" / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [pytest.param(name, marks=SEVERAL[name].marks) for name in SEVERAL])
def test_the_messages_are_what_the_page_says(name):
    each = SEVERAL[name]
    done = job(each.body, **each.options)
    assert_says(done, *map(pattern, each.messages))
    assert done.returncode is not None


@pytest.mark.parametrize("message", COMMANDS)
def test_a_command_says_what_the_page_says(message):
    done = subprocess.run(
        [sys.executable, *COMMANDS[message]], cwd=ROOT, env=child_environment(), capture_output=True, text=True,
        timeout=60 * SCALE, check=False,
    )
    assert re.search(pattern(message), done.stderr), done.stderr


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


KILLED = "os.kill(os.getpid(), signal.{}) if rank else reduce('x')"
FAILED = "sys.exit(1) if rank else reduce('x')"
FINALIZED = "from mpi4py import MPI; MPI.Finalize(); MPI.COMM_WORLD.barrier()"
MPICH, OPEN_MPI = "mpich", "openmpi"

# What an MPI library says: which one, and a script or else options of its launcher.
OF_MPI = {
    "Abort(1) on node 1 (rank 1 in comm 0): application called MPI_Abort": (MPICH, FAILED),
    "MPI_ABORT was invoked on rank 1": (OPEN_MPI, FAILED),
    "BAD TERMINATION ... Killed (signal 9)": (MPICH, KILLED.format("SIGKILL")),
    "signal 9 (Killed)": (OPEN_MPI, KILLED.format("SIGKILL")),
    "BAD TERMINATION ... Bus error (signal 7)": (MPICH, KILLED.format("SIGBUS")),
    "signal 7 (Bus error)": (OPEN_MPI, KILLED.format("SIGBUS")),
    "Alarm clock (signal 14)": (MPICH, KILLED.format("SIGALRM")),
    "signal 14 (Alarm clock)": (OPEN_MPI, KILLED.format("SIGALRM")),
    "Attempting to use an MPI routine ... after finalizing MPI": (MPICH, FINALIZED),
    "MPI_FINALIZE was invoked": (OPEN_MPI, FINALIZED),
    "unrecognized argument oversubscribe": (MPICH, ["-np", "2", "--oversubscribe", "true"]),
    "There are not enough slots available": (OPEN_MPI, ["-np", "99", "true"]),
    "prterun has detected an attempt to run as root": (OPEN_MPI, ["-np", "1", "true"]),
}

# These need several hosts, another library, or a build of it that prints them.
NEED_MORE = {
    "KILLED BY SIGNAL: 9", "KILLED BY SIGNAL: 7",
    "... osc_ucx ... priority", "Permission denied (publickey)", "Host key verification failed", "unable to connect",
    "no route to host",
}


def test_every_message_of_the_mpi_libraries_is_provoked_where_it_can_be():
    assert set(MPI_ROWS) == {*OF_MPI, *NEED_MORE}


@pytest.mark.openmpi
@pytest.mark.parametrize("message", OF_MPI)
def test_the_mpi_library_says_what_the_page_says(message):
    library, what = OF_MPI[message]
    if launcher().name != library:
        pytest.skip(f"a message of {library}")
    if isinstance(what, str):
        output = job(what).output
    else:
        as_root = "attempt to run as root" in message
        if as_root and os.geteuid() != 0:
            pytest.skip("needs root")
        allowed = {f"OMPI_ALLOW_RUN_AS_ROOT{suffix}": "1" for suffix in ("", "_CONFIRM")}
        unset = {*allowed, "PRTE_MCA_rmaps_default_mapping_policy"}
        env = {name: value for name, value in child_environment().items() if name not in unset}
        done = subprocess.run(
            [launcher().path, *what], env=env if as_root else {**env, **allowed}, capture_output=True, text=True,
            timeout=60 * SCALE, check=False,
        )
        output = done.stdout + done.stderr
    assert re.search(pattern(message), output, re.DOTALL), output
