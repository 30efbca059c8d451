"""Several hosts: the doctor names those that can't be reached and those that can't talk to one another."""

from __future__ import annotations

import json
import sys
import time

import pytest

from tests.faults.hosts import cluster, on_first_host, part, processes
from tests.launch import SCALE, launcher, wait_until

pytestmark = pytest.mark.netns

GOES_ON = """
import os, subprocess, sys, time
import numpy as np
import horo_lite as hvd

hvd.init()
hvd.allreduce(np.ones(4), name="warm-up")
hvd.barrier()
print("under way", flush=True)
hvd.barrier()
if hvd.rank() == 1:
    subprocess.run(sys.argv[1], shell=True)
for step in range(10**9):
    hvd.allreduce(np.ones(4), name="x")
"""
CUT = "ip link set eth0 down"
KILL = "kill -9 $(ip netns pids $(hostname))"  # its launcher's helper, the rank and itself


def run_on(made, ranks, fault):
    """A job with one rank on each host, of which the second one breaks its own host."""
    env = {"HORO_LITE_STALL_WARN_S": "2", "HORO_LITE_STALL_ABORT_S": "4" if fault == CUT else "60"}
    launch = [launcher().path, "-iface", "eth0", "-hosts", ",".join(made.hosts), "-ppn", "1", "-n", str(ranks)]
    done = on_first_host(made, [*launch, sys.executable, "-c", GOES_ON, fault], limit_s=40, env=env)
    assert done.returncode != 0
    assert "under way" in done.stdout, done.stdout + done.stderr  # of a host that dies, nothing may arrive
    return done.stdout + done.stderr


def assert_all_end(made, limit_s):
    """No rank is left on any host; helpers of the launcher notice a cut only when TCP does."""
    wait_until(lambda: not processes(made, "python"), time.monotonic() + limit_s * SCALE)
    assert not processes(made, "python")


def test_small_operations_on_several_hosts():
    script = """
import numpy as np
import horo_lite as hvd

hvd.init()
results = [hvd.allreduce(np.ones(4), op=hvd.Sum, name="x")[0] for step in range(20)]
hvd.barrier()
print("got", sum(results), flush=True)
"""
    with cluster(3) as made:
        launch = [launcher().path, "-iface", "eth0", "-hosts", ",".join(made.hosts), "-ppn", "1", "-n", "3"]
        done = on_first_host(made, [*launch, sys.executable, "-c", script], limit_s=20, env={})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("got 60.0") == 3


def test_a_host_that_is_cut_off_ends_the_job():
    with cluster(2) as made:
        output = run_on(made, 2, CUT)
        assert "has waited" in output  # in x, or in the barrier before it
        assert "rank 1 is silent: it is stopped, cut off" in output
        assert "The job ends now (HORO_LITE_STALL_ABORT_S" in output
        assert_all_end(made, 20.0)  # the rank that is cut off finds it out by itself


def test_a_host_that_dies_ends_the_job():
    with cluster(3) as made:
        run_on(made, 3, KILL)
        assert_all_end(made, 10.0)


@pytest.mark.slow
def test_the_doctor_names_hosts_that_cannot_talk_or_be_reached():
    with cluster(4) as made:
        part(made, 1, 2)
        hosts = [*made.hosts, "nowhere"]
        done = on_first_host(made, [
            sys.executable, "-m", "horo_lite.cli", "doctor", "--json", "--hosts", ",".join(hosts),
            "--network-interface", "eth0", "--pair-timeout", str(15 * SCALE),
        ], limit_s=180, env={})  # fmt: skip
    report = json.loads(done.stdout)
    said = report["sections"]["Hosts"]
    assert {name for name in said if "can't talk" in said[name]} == {f"{made.hosts[1]} - {made.hosts[2]}"}
    assert {name for name in said if "could not start" in said[name]} == {"nowhere"}
    assert len([name for name in said if "GB/s" in said[name]]) == 5  # of six pairs
    assert len([line for line in report["advice"] if line.startswith((made.hosts[1], "nowhere"))]) == 2
    assert not report["works"] and done.returncode == 1
