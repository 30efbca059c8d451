"""Several hosts: the doctor names those that can't be reached and those that can't talk to one another."""

from __future__ import annotations

import json
import sys

import pytest

from tests.faults.hosts import cluster, on_first_host, part
from tests.launch import SCALE

pytestmark = pytest.mark.netns


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
