"""Hosts, horovodrun's flags, restarts: what the launcher's command line becomes."""

from __future__ import annotations

import shlex

import pytest
from click.testing import CliRunner

from horo_lite.cli import finding, launchers, machine, run
from horo_lite.cli.hosts import Host, parse_hosts, read_hostfile
from horo_lite.cli.main import main
from horo_lite.errors import ArgumentError, LaunchError

HOSTS = (Host("a", 2), Host("b", 2))


def words(kind, **fields):
    return kind("/bin/x").command(launchers.Job(["prog"], 4, 8, **fields))


@pytest.mark.parametrize("text", ["a:2,b:2", "a:2, b:2", "a:1,b:2,a:1"])
def test_a_list_of_hosts(text):
    assert parse_hosts(text) == HOSTS


def test_a_hostfile_in_each_launchers_form(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# all of them\na slots=2\n\nb:2   # the second\nc\nd slots = 3 max_slots=4\n")
    assert read_hostfile(path) == (*HOSTS, Host("c"), Host("d", 3))


@pytest.mark.parametrize("text", ["a:two", "a b", ":2"])
def test_a_host_that_cannot_be_read_is_named(text):
    with pytest.raises(ArgumentError, match=text.split(",")[0]):
        parse_hosts(text)


@pytest.mark.parametrize("kind, expected", [
    (launchers.Hydra, "-hosts a:2,b:2"),
    (launchers.IntelMPI, "-hosts a,b -ppn 2"),
    (launchers.OpenMPI, "--host a:2,b:2"),
    (launchers.OpenMPI4, "--host a:2,b:2"),
    (launchers.Slurm, "--nodelist=a,b --nodes=2 --ntasks-per-node=2"),
])
def test_hosts_in_each_launchers_words(kind, expected):
    assert expected in " ".join(words(kind, hosts=HOSTS))


@pytest.mark.parametrize("kind, expected", [
    (launchers.Hydra, "-iface eth1"),
    (launchers.OpenMPI, "--mca btl_tcp_if_include eth1 --prtemca prte_if_include eth1"),
    (launchers.OpenMPI4, "--mca btl_tcp_if_include eth1 --mca oob_tcp_if_include eth1"),
])
def test_the_network_interface(kind, expected):
    assert expected in " ".join(words(kind, interface="eth1"))


@pytest.mark.parametrize("kind", [launchers.Hydra, launchers.OpenMPI, launchers.OpenMPI4, launchers.Slurm])
def test_output_into_files_is_not_tagged(kind):
    line = " ".join(words(kind, output_folder="logs"))
    assert "logs" in line
    assert "prepend" not in line and "--tag-output" not in line and "--label" not in line


def test_slots_that_differ_where_they_must_not():
    with pytest.raises(LaunchError, match="a:1, b:3"):
        words(launchers.Slurm, hosts=(Host("a", 1), Host("b", 3)))


def test_variables_reach_other_hosts_of_open_mpi():
    assert "-x PATH" in " ".join(words(launchers.OpenMPI, hosts=HOSTS, forwarded=("PATH",)))


@pytest.fixture
def hydra(monkeypatch):
    monkeypatch.setattr(finding, "find_launcher", lambda library=None, name=None: launchers.Hydra("/mpirun"))
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)


def invoke(*args: str):
    return CliRunner().invoke(main, ["run", *args])


def test_horovodruns_flags(hydra):
    result = invoke(
        "-np", "4", "-H", "a:2,b:2", "--gloo", "--fusion-threshold-mb", "32", "--timeline-filename", "t.json",
        "--stall-check-warning-time-seconds", "9", "--start-timeout", "60", "--disable-cache", "--dry-run", "train.py",
    )
    assert result.exit_code == 0, result.output
    for text in ("HORO_LITE_BUCKET_BYTES=33554432", "HORO_LITE_TIMELINE=t.json", "HORO_LITE_STALL_WARN_S=9", "a:2,b:2"):
        assert text in result.output


@pytest.mark.parametrize("words", [
    "--cycle-time-ms 5", "--cache-capacity 0", "--start-timeout 60", "--thread-affinity 0", "--binding-args=-x",
    "--slots-per-host 2", "--elastic-timeout 5", "--reset-limit 3", "--num-nccl-streams 2", "--gloo-timeout-seconds 9",
    "--autotune-log-file f", "--autotune-warmup-samples 1", "--autotune-steps-per-sample 1",
    "--autotune-bayes-opt-max-samples 1", "--autotune-gaussian-process-noise 0.1", "--min-np 1", "--max-np 9",
    "--min-num-proc 1", "--max-num-proc 9", "--blacklist-cooldown-range 1 2", "--gloo", "--tcp", "--disable-cache",
    "--autotune", "--no-autotune", "--mpi-threads-disable", "--no-mpi-threads-disable", "--hierarchical-allreduce",
    "--no-hierarchical-allreduce", "--hierarchical-allgather", "--no-hierarchical-allgather", "--torus-allreduce",
    "--no-torus-allreduce", "--no-timeline-mark-cycles", "--stall-check", "--log-with-timestamp",
    "--log-without-timestamp", "-prefix-timestamp", "--prefix-output-with-timestamp",
])
def test_a_flag_of_horovodruns_without_effect_is_taken_and_named(hydra, words):
    plain = invoke("-np", "2", "--dry-run", "train.py")
    result = invoke("-np", "2", *words.split(), "--dry-run", "train.py")
    assert result.exit_code == 0, result.output
    command, *said = result.output.splitlines()
    assert [command] == plain.output.splitlines()
    flag = words.split()[0].split("=")[0].replace("-np", "-num-proc")
    flag = flag.replace("-prefix-timestamp", "--prefix-output-with-timestamp")
    assert said == [f"horo-lite: without effect here: {flag}"]


@pytest.mark.parametrize(("words", "advice"), [
    ("--host-discovery-script find.sh", "give -np and --hosts"), ("--config-file c.yaml", "HOROVOD_ variables"),
    ("-cb", "horo-lite doctor"), ("--check-build", "horo-lite doctor"), ("--jsrun", "by jsrun itself"),
])
def test_a_flag_of_horovodruns_for_what_there_is_not_is_refused(hydra, words, advice):
    result = invoke("-np", "2", *words.split(), "--dry-run", "train.py")
    assert result.exit_code == 2
    assert advice in " ".join(result.output.split())


@pytest.mark.parametrize(("kind", "variable"), [
    (launchers.Hydra, "HYDRA_LAUNCHER_EXTRA_ARGS"), (launchers.IntelMPI, "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"),
    (launchers.OpenMPI, "PRTE_MCA_plm_ssh_args"), (launchers.OpenMPI4, "OMPI_MCA_plm_rsh_args"),
])
def test_ssh_gets_its_port_and_key(monkeypatch, kind, variable):
    monkeypatch.setattr(finding, "find_launcher", lambda library=None, name=None: kind("/mpirun"))
    result = invoke("-H", "a:1,b:1", "-p", "2222", "-i", "/my key", "--dry-run", "train.py")
    assert result.exit_code == 0, result.output
    assert f"{variable}=-p 2222 -i '/my key'" in shlex.split(result.output)


def test_with_hosts_every_slot_is_used(hydra):
    assert "-np 4 -hosts a:2,b:2" in invoke("-H", "a:2,b:2", "--dry-run", "train.py").output


@pytest.mark.parametrize("args, text", [
    (["train.py"], "-np N"),
    (["-np", "5", "-H", "a:2,b:2", "train.py"], "the hosts have 4 slots"),
    (["-H", "a:2", "--hostfile", __file__, "train.py"], "not both"),
])
def test_contradictions_are_refused(hydra, args, text):
    result = invoke(*args)
    assert result.exit_code == 2
    assert text in result.output


@pytest.fixture
def job(hydra, monkeypatch):
    """Jobs that end with given statuses; the numbers of their starts."""
    starts, statuses = [], []

    def supervise(command, environment, timeout_s):
        starts.append(environment["HORO_LITE_RESTARTS"])
        return statuses[len(starts) - 1]

    monkeypatch.setattr(run, "supervise", supervise)
    monkeypatch.setattr(run.time, "sleep", lambda seconds: None)
    return starts, statuses


@pytest.mark.parametrize("ends, status, count", [
    ([1, 9, 0], 0, 3), ([1, 1, 1], 1, 3), ([0], 0, 1), ([130], 130, 1), ([124], 124, 1),
])
def test_restarts(job, ends, status, count):
    starts, statuses = job
    statuses += ends
    assert invoke("-np", "2", "--max-restarts", "2", "train.py").exit_code == status
    assert starts == [str(number) for number in range(count)]
