"""An operation that waits in vain is reported with its name, the missing ranks and what they do, then ends the job."""

from __future__ import annotations

import re

import pytest

from tests.faults.jobs import PREAMBLE, STALL, assert_bad_end, assert_good_end, job, tagged

ONLY_WARN = {**STALL, "HORO_LITE_STALL_ABORT_S": "0"}
LATE = {"env": ONLY_WARN, "awaited": "has waited for"}
"""A job whose late ranks wait with ``until_said()`` for the warning, however busy the machine is."""
PATIENT = {"HORO_LITE_STALL_WARN_S": "3", "HORO_LITE_STALL_ABORT_S": "4"}
"""For jobs that must not be warned: a busy machine, too, keeps ranks apart for a second."""


@pytest.mark.openmpi
def test_a_late_rank_gives_one_warning_and_a_right_result():
    done = job("""
        def compiles():
            until_said()
        compiles() if rank == 1 else None
        assert (reduce("x") == size).all()
    """, ranks=3, **LATE)
    assert_good_end(done, r"allreduce of tensor 'x' has waited for \d+ s: rank 1 has not submitted it", "in compiles",
                    "HORO_LITE_STALL_WARN_S", r"hvd\.long_work\(\)")
    assert done.output.count("has waited for") == 1


@pytest.mark.openmpi
def test_a_rank_that_never_comes_ends_the_job():
    done = job("""
        def endless():
            while True:
                pass
        endless() if rank == 1 else reduce("x")
    """, env={"HORO_LITE_STALL_ABORT_S": "3"})
    assert_bad_end(done, "'x' has waited", "rank 1 has not submitted it", "in endless", "HORO_LITE_STALL_ABORT_S")


@pytest.mark.openmpi
@pytest.mark.parametrize("end, text", [
    ("pass", "rank 1 has finished"),
    ("sys.exit(0)", "rank 1 has finished"),
    ("raise SystemExit(4)", "rank 1 has finished"),
    ("hvd.shutdown(); time.sleep(60)", r"rank 1 has called shutdown\(\)"),
    ("from mpi4py import MPI; MPI.Finalize(); time.sleep(60)", "rank 1 has finalized MPI"),
])
def test_a_rank_that_has_ended_early_is_named(end, text):
    done = job(f"if rank == 1:\n    {end}\nelse:\n    reduce('x')\n    time.sleep(9)", env=STALL)
    assert_bad_end(done, "tensor 'x' has waited", text, r"call join\(\)")


def test_an_operation_on_one_rank_only_is_found_where_the_others_are():
    done = job("""
        def train():
            reduce("step")
        if rank == 0:
            reduce("avg_loss")
        train()
    """, env=STALL)
    assert_bad_end(done, "'avg_loss' has waited .*rank 1 has not submitted it", "rank 1 waits for 'step'", "in train")


def test_one_rank_speaks_for_all_that_wait():
    done = job("until_said() if rank == 3 else None; reduce('x')", ranks=4, **LATE)
    assert_good_end(done, r"\[rank 0\].*rank 3 has not submitted it")
    assert done.output.count("has waited for") == 1


def test_a_late_first_rank_is_reported_by_the_next():
    done = job("until_said() if rank == 0 else None; reduce('x')", ranks=3, **LATE)
    assert_good_end(done, r"\[rank 1\].*rank 0 has not submitted it")


def test_a_stopped_rank_is_reported_as_silent():
    done = job("os.kill(os.getpid(), signal.SIGSTOP) if rank == 1 else reduce('x')", env=STALL)
    assert_bad_end(done, "rank 1 has not answered", "rank 1 is silent")


def test_a_rank_in_code_that_keeps_python_out_prints_its_stacks_from_c():
    done = job("""
        import ctypes
        def held():
            ctypes.PyDLL(None).sleep(60)  # the signal that asks for the stacks ends it
            time.sleep(60)
        held() if rank == 1 else None
        reduce("x")
    """, env=STALL)
    assert_bad_end(done, "rank 1 is silent", "line .* in .*held")  # untagged lines of ranks are mixed


def test_a_collective_in_a_signal_handler_amid_another_is_refused():
    done = job("""
        signal.signal(signal.SIGUSR1, lambda *_: reduce("saving"))
        if rank == 1:
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            reduce("x")
        time.sleep(60)
    """)
    assert_bad_end(done, r"\[rank 1\] .*a signal handler or a finalizer called a collective", "in <lambda>")


def test_messages_that_are_lost_end_the_job():
    done = job("[reduce(f'{i}') for i in range(100)]", env={**STALL, "HORO_LITE_TEST_FAULT": "1:30:cut"})
    assert_bad_end(done, r"has waited .*rank 1 has not answered")


def test_a_delay_in_the_transport_is_survived():
    env = {**ONLY_WARN, "HORO_LITE_TEST_FAULT": "1:9:delay"}
    assert_good_end(job("[reduce(f'{i}') for i in range(100)]", env=env))


def test_gradients_that_wait_in_vain_are_named():
    done = job("""
        from horo_lite.gradients import GradientBuckets
        buckets = GradientBuckets([("weight", (3,), "float32")])
        def forward():
            time.sleep(60)
        for step in range(3):
            if rank == 1 and step == 2:
                forward()
            buckets.ready(0)
            buckets.finish()
    """, env=STALL)
    assert_bad_end(done, r"optimizer, bucket 0 \(weight.*has waited", "in forward")


def test_gradients_of_a_rank_that_has_ended():
    done = job("""
        from horo_lite.gradients import GradientBuckets
        buckets = GradientBuckets([("weight", (3,), "float32")])
        for step in range(2 + (rank == 0)):
            buckets.ready(0)
            buckets.finish()
    """, env=STALL)
    assert_bad_end(done, r"optimizer, bucket 0 \(weight.*rank 1 has finished", r"join\(\)")


MAKES_A_PAIR = "pair = hvd.ProcessSet([1, 2]); hvd.init(process_sets=[pair])"


def test_a_process_set_waits_for_its_own_members_alone():
    done = job("""
        if rank != 1:
            until_said()
        if rank != 0:
            hvd.allreduce(np.ones(3), name="ours", process_set=pair)
    """, ranks=3, preamble=PREAMBLE.replace("hvd.init()", MAKES_A_PAIR), **LATE)
    assert_good_end(done, r"\[rank 1\].*'ours' has waited .*: rank 2 has not submitted it")


def test_waiting_in_join_is_no_stall():
    done = job("time.sleep(6) if rank == 0 else None; hvd.join()", env=PATIENT)
    assert_good_end(done)
    assert not [line for line in tagged(done) if "has waited" in line]


def test_join_while_others_have_ended():
    done = job("hvd.join() if rank == 1 else None", env=STALL)
    assert_bad_end(done, r"join\(\) has waited .*rank 0 has finished")


def test_ranks_that_have_ended_say_for_whom_they_wait():
    done = job("""
        def saves():
            until_said()
        saves() if rank == 1 else None
    """, ranks=3, env=ONLY_WARN, awaited="in saves")
    assert_good_end(done, r"ranks 0, 2 came to the end \d+ s ago; the job ends once rank 1 is there too", "in saves")


def test_long_work_suspends_the_watch():
    done = job("""
        if rank == 1:
            with hvd.long_work():
                time.sleep(6)
        reduce("x")
    """, env=PATIENT)
    assert_good_end(done)
    assert "has waited" not in done.output


def test_the_first_rank_goes_first(tmp_path):
    done = job("""
        path = sys.argv[1]
        with hvd.rank0_first():
            if rank == 0:
                time.sleep(6)
                open(path, "w").write("data")
            assert open(path).read() == "data"
        assert (reduce("x") == size).all()
    """, env=PATIENT, ranks=3, arguments=(str(tmp_path / "data"),))
    assert_good_end(done)
    assert "has waited" not in done.output


@pytest.mark.parametrize("env", [
    {"HORO_LITE_STALL_WARN_S": "0", "HORO_LITE_STALL_ABORT_S": "0"},
    {"HOROVOD_STALL_CHECK_DISABLE": "1"},
    {},
], ids=["off", "off in Horovod's words", "by default"])
def test_no_warning(env):
    done = job("time.sleep(3) if rank == 1 else None; reduce('x')", env=env)
    assert_good_end(done)
    assert "has waited" not in done.output


def test_horovods_variables_are_read():
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}
    done = job("time.sleep(60) if rank == 1 else reduce('x')", env=env)
    assert_bad_end(done, r"once, after 1 s \(HORO_LITE_STALL_WARN_S\); the job ends after 3 s", "The job ends now")


def test_an_operation_that_nobody_waits_for_is_no_stall():
    done = job("""
        handle = hvd.allreduce_async(np.ones(3), name="later") if rank == 0 else None
        time.sleep(5)
        handle = handle or hvd.allreduce_async(np.ones(3), name="later")
        hvd.synchronize(handle)
    """, env=PATIENT)
    assert_good_end(done)
    assert "has waited" not in done.output


def test_a_repeated_name_is_no_stall():
    """Each call counts from its own start."""
    done = job("""
        begin = time.monotonic()
        while reduce("go on")[0] and hvd.broadcast(np.array(time.monotonic() - begin < 5), 0, name="time"):
            pass
    """, env=PATIENT)
    assert_good_end(done)
    assert "has waited" not in done.output


def test_a_waiting_rank_and_its_watch_leave_the_core_to_others():
    done = job("""
        begin = time.process_time()
        time.sleep(4) if rank == 1 else reduce("x")
        print("used", round(time.process_time() - begin, 2), flush=True)
        reduce("x") if rank == 1 else None
    """, env=ONLY_WARN)
    assert_good_end(done)
    assert all(float(used) < 0.8 for used in re.findall(r"used ([\d.]+)", done.output)), done.output
