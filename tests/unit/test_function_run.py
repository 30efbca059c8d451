"""``horo_lite.run``: Horovod's keywords, as words that ``horo-lite run`` understands."""

from __future__ import annotations

import inspect
import subprocess

import pytest
from click.testing import CliRunner

import horo_lite
from horo_lite.cli import finding, launchers
from horo_lite.cli.main import main


@pytest.fixture
def words(monkeypatch):
    """Calls ``run`` up to the start of the job; the words of ``horo-lite run``, which takes them."""
    monkeypatch.setattr(finding, "find_launcher", lambda library=None, name=None: launchers.Hydra("/mpirun"))

    def called(*args, **keywords) -> list[str]:
        seen = []

        def start(command, **options):
            seen.extend(command)
            return subprocess.CompletedProcess(command, 1)

        monkeypatch.setattr(subprocess, "run", start)
        with pytest.raises(horo_lite.HorovodInternalError):
            horo_lite.run(len, *args, **keywords)
        monkeypatch.undo()
        monkeypatch.setattr(finding, "find_launcher", lambda library=None, name=None: launchers.Hydra("/mpirun"))
        given = seen[seen.index("run") + 1 : seen.index("horo_lite.cli.function_rank") - 2]
        result = CliRunner().invoke(main, ["run", "--dry-run", *given, "f.py"])
        assert result.exit_code == (2 if "--host-discovery-script" in given else 0), result.output
        return given

    return called


@pytest.mark.parametrize(("keywords", "expected"), [
    ({"num_proc": 3}, "-np 3"),
    ({"np": 3}, "-np 3"),
    ({"min_num_proc": 1, "max_num_proc": 4}, "-np 1 --min-num-proc 1 --max-num-proc 4"),
    ({"min_np": 1, "max_np": 4}, "-np 1 --min-np 1 --max-np 4"),
    ({"slots": 2, "reset_limit": 3}, "-np 1 --slots-per-host 2 --reset-limit 3"),
    ({"cooldown_range": (1, 5)}, "-np 1 --blacklist-cooldown-range 1 5"),
    ({"hosts": "a:1"}, "-np 1 --hosts a:1"),
    ({"hostfile": "/dev/null"}, "-np 1 --hostfile /dev/null"),
    ({"host_discovery_script": "s"}, "-np 1 --host-discovery-script s"),
    ({"start_timeout": 9, "disable_cache": True}, "-np 1 --start-timeout 9 --disable-cache"),
    ({"ssh_port": 22, "ssh_identity_file": "k"}, "-np 1 --ssh-port 22 --ssh-identity-file k"),
    ({"output_filename": "o", "verbose": 1}, "-np 1 --verbose --output-filename o"),
    ({"use_gloo": True, "use_mpi": False}, "-np 1 --gloo"),
    ({"use_gloo": None, "use_mpi": True}, "-np 1 --mpi"),
    ({"mpi_args": "-x"}, "-np 1 --mpi-args -x"),
    ({"network_interface": "eth0"}, "-np 1 --network-interface eth0"),
    ({"network_interfaces": ["eth0", "eth1"]}, "-np 1 --network-interfaces eth0,eth1"),
])
def test_every_keyword_of_horovods_is_a_flag(words, keywords, expected):
    assert words(**keywords) == expected.split()


def test_horovods_positions(words):
    assert words((), {}, 2) == ["-np", "2"]
    names = ["func", "args", "kwargs", "num_proc"]
    assert [*inspect.signature(horo_lite.run).parameters][:4] == names


def test_a_keyword_of_nobodys():
    with pytest.raises(TypeError, match="'nproc'"):
        horo_lite.run(len, nproc=2)
