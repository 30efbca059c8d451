"""The doctor's sections and advice on machines of all kinds, and the order in which pairs of hosts are tested."""

from __future__ import annotations

import itertools
import sys

import pytest
from click.testing import CliRunner

from horo_lite.cli import examination, launchers, machine, selftest
from horo_lite.cli.host_test import HostTest, rounds
from horo_lite.cli.main import main
from horo_lite.transport import cuda


@pytest.mark.parametrize("count", range(10))
def test_each_pair_of_hosts_meets_once_and_none_has_two_partners_at_a_time(count):
    hosts = [f"host{number}" for number in range(count)]
    tournament = rounds(hosts)
    met = [frozenset(pair) for pairs in tournament for pair in pairs]
    assert sorted(map(sorted, met)) == sorted(map(sorted, itertools.combinations(hosts, 2)))
    for pairs in tournament:
        assert len({host for pair in pairs for host in pair}) == 2 * len(pairs)


class Fake(launchers.Hydra):
    """Starts nothing on hosts: a shell script stands for the job, with their names as its arguments."""

    script = ""

    def command(self, job):
        return ["sh", "-c", self.script, "sh", *(host.name for host in job.hosts)]


RESULT = selftest._MARK + '{"size": 2, "latency_s": 1e-6, "bytes_per_s": 1e9}'


def outcomes(script: str, hosts: list[str], limit_s: float = 20.0) -> dict[tuple[str, ...], str]:
    launcher = Fake("mpirun")
    launcher.script = script
    test = HostTest(launcher, launchers.Job([], 1, 1), limit_s)
    return {outcome.hosts: outcome.fault for outcome in test.run(hosts)}


def test_a_host_that_cannot_be_reached_is_named_and_left_out():
    found = outcomes(f"[ $1 = b ] && {{ echo 'SomeError: no way'; exit 7; }}; echo '{RESULT}'", ["a", "b", "c"])
    assert found.keys() == {("a",), ("b",), ("c",), ("a", "c")}
    assert found["b",] == "could not start a process there (exit status 7): SomeError: no way"
    assert [found[hosts] for hosts in found if hosts != ("b",)] == ["", "", ""]


def test_a_pair_that_hangs_is_named_and_ended():
    found = outcomes(f"[ $1$2 = ab ] && sleep 60; echo '{RESULT}'", ["a", "b", "c"], limit_s=1.0)
    assert found.pop(("a", "b")) == "they can't talk to one another: no end within 1 s"
    assert set(found.values()) == {""}


def test_a_pair_whose_ranks_do_not_see_one_another_has_failed():
    found = outcomes(f"echo '{RESULT}' | sed 's/2,/1,/'", ["a", "b"])
    assert found["a", "b"].startswith("they can't talk to one another (exit status 0)")


@pytest.fixture
def limits(monkeypatch):
    """Sets what a machine allows, by the name of the limit; everything else is unlimited."""

    def allow(adapters=(), **values):
        monkeypatch.setattr(machine, "limit", lambda name: values.get(name))
        monkeypatch.setattr(machine, "infiniband", lambda: list(adapters))
        report = examination.Report()
        examination._limits(report)
        return report

    return allow


def test_no_limits_no_advice(limits):
    report = limits()
    assert set(report.sections["Limits"].values()) == {"unlimited"}
    assert not report.advice


@pytest.mark.parametrize("values, advice", [
    ({"RLIMIT_NOFILE": 256}, "ulimit -n"),
    ({"RLIMIT_MEMLOCK": 65536, "adapters": ["mlx5_0"]}, "mlx5_0 needs locked memory"),
    ({"RLIMIT_AS": 4 << 30}, "4,096 MiB"),
])
def test_a_limit_that_hurts_is_one_line_of_advice(limits, values, advice):
    report = limits(**values)
    assert len(report.advice) == 1
    assert advice in report.advice[0]


def test_locked_memory_matters_with_adapters_alone(limits):
    assert not limits(RLIMIT_MEMLOCK=65536).advice


@pytest.mark.parametrize("room", [None, (64 << 20, 64 << 20)])
def test_a_small_shared_memory_is_advised_on(room, monkeypatch):
    monkeypatch.setattr(machine, "shared_memory_bytes", lambda: room)
    report = examination.Report()
    examination._system(report)
    assert "--shm-size" in report.advice[0]


@pytest.mark.parametrize("ends, said", [
    ("os.kill(os.getpid(), signal.SIGSEGV)", "no (the child that tried it was ended by SIGSEGV)"),
    ("sys.exit(3)", "no (torch sees no CUDA device)"),
    ("sys.exit(0)", "yes"),
])
def test_a_crash_of_the_probe_is_an_answer(ends, said, monkeypatch):
    child = (sys.executable, "-c", f"import os, signal, sys; {ends}")
    reason = cuda.why_not(child)
    monkeypatch.setattr(examination.cuda, "why_not", lambda: reason)
    monkeypatch.setattr(examination, "_version", lambda package: "2")
    report = examination.Report()
    examination._devices(report)
    assert report.sections["CUDA"]["device memory in MPI"] == said
    assert len(report.advice) == (said == "yes")


def test_without_torch_there_is_no_device_to_ask_for(monkeypatch):
    monkeypatch.setattr(examination, "_version", lambda package: None)
    report = examination.Report()
    examination._devices(report)
    assert "CUDA" not in report.sections


def test_memory_quotas_of_both_control_groups(tmp_path, monkeypatch):
    installed, _ = machine.memory_bytes()
    for text, expected in (("max", None), (str(1 << 20), 1 << 20), ("9223372036854771712", None)):
        quota = tmp_path / "memory.max"
        quota.write_text(text)
        monkeypatch.setattr(machine, "_MEMORY_QUOTAS", (tmp_path / "none", quota))
        assert machine.memory_bytes() == (installed, expected)


def test_wrong_words_are_refused(tmp_path):
    for words in (["--hosts", "a b"], ["--hosts", "a", "--hostfile", __file__], ["--pair-timeout", "0"]):
        assert CliRunner().invoke(main, ["doctor", *words]).exit_code == 2


def test_the_cause_is_a_python_error_among_a_launchers_notices():
    assert selftest.cause("=====\nValueError: here\n=  BAD TERMINATION  =") == "ValueError: here"
    assert selftest.cause("") == "it said nothing"
