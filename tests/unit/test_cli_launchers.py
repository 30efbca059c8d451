"""What each launcher is told, and which one is chosen; no MPI is started."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from horo_lite.cli import finding, launchers, machine
from horo_lite.cli.finding import Library
from horo_lite.cli.hosts import Host
from horo_lite.cli.launchers import Hydra, IntelMPI, Job, OpenMPI, OpenMPI4, Slurm
from horo_lite.errors import LaunchError, MPIMissingError
from horo_lite.transport.mpi import how_to_have_one

SCRIPT = ["python", "train.py"]


def job(ranks: int = 2, cores: int = 4, **more) -> Job:
    return Job(SCRIPT, ranks, cores, **more)


@pytest.fixture(params=[True, False], ids=["root", "not-root"])
def root(request, monkeypatch) -> bool:
    monkeypatch.setattr(machine, "is_root", lambda: request.param)
    return request.param


@pytest.mark.parametrize("kind", launchers.LAUNCHERS)
def test_a_command_ends_with_the_users_words_and_names_the_ranks(kind):
    words = kind("/there/program").command(job(extra=["--own", "x"]))
    assert words[0] == "/there/program"
    assert words[-4:] == ["--own", "x", *SCRIPT]
    assert "2" in words or "--ntasks=2" in words


def test_hydra_needs_no_flag_for_root_or_slots(root):
    assert Hydra("mpirun").command(job(4, 2)) == ["mpirun", "-np", "4", "-prepend-rank", *SCRIPT]


def test_open_mpi_is_allowed_root_only_where_it_is_root(root):
    for kind in (OpenMPI, OpenMPI4):
        assert ("--allow-run-as-root" in kind("mpirun").command(job())) == root


@pytest.mark.parametrize(
    "kind, words",
    [(OpenMPI, "--map-by :OVERSUBSCRIBE --bind-to none"), (OpenMPI4, "--oversubscribe --bind-to none")],
)
def test_open_mpi_takes_more_ranks_than_cores_and_binds_nobody_to_one(kind, words):
    assert words in " ".join(kind("mpirun").command(job(4, 2)))


@pytest.mark.parametrize(
    "kind, words",
    [
        (Hydra, "-bind-to core:2"),
        (OpenMPI, "--map-by slot:PE=2:OVERSUBSCRIBE --bind-to core"),
        (OpenMPI4, "--map-by slot:PE=2 --bind-to core"),
        (Slurm, "--cpus-per-task=2 --cpu-bind=cores"),
    ],
)
def test_binding_gives_each_rank_its_share_of_the_cores(kind, words):
    assert words in " ".join(kind("mpirun").command(job(2, 4, bind=True)))


def test_intel_mpi_is_bound_by_its_variables_and_found_on_path():
    launcher = IntelMPI("/intel/bin/mpirun")
    assert launcher.environment(job(bind=True))["I_MPI_PIN_DOMAIN"] == "2:compact"
    assert launcher.environment(job())["I_MPI_PIN"] == "0"
    assert launcher.environment(job())["PATH"].startswith("/intel/bin" + os.pathsep)


@pytest.mark.parametrize("kind", [Hydra, OpenMPI, OpenMPI4, Slurm])
def test_no_binding_where_ranks_share_cores(kind):
    launcher = kind("mpirun")
    assert launcher.command(job(4, 2, bind=True)) == launcher.command(job(4, 2, bind=False))


@pytest.mark.parametrize("kind", launchers.LAUNCHERS)
def test_untagged_output(kind):
    tagged, plain = (kind("mpirun").command(job(tag_output=tag)) for tag in (True, False))
    assert set(plain) < set(tagged)


@pytest.mark.parametrize("ranks, cores, share", [(1, 8, 8), (3, 8, 2), (8, 8, 1), (16, 8, 1)])
def test_cores_per_rank(ranks, cores, share):
    assert job(ranks, cores).cores_per_rank == share
    assert job(ranks, cores).oversubscribed == (ranks > cores)


VERSIONS = {
    "MPICH Version:      5.0.2\nMPICH Release date: ...": Hydra,
    "Intel(R) MPI Library 2021.18 for Linux* OS": IntelMPI,
    "Open MPI v5.0.11, package: Open MPI user@host Distribution": OpenMPI,
    "Open MPI v4.1.4, package: Debian OpenMPI": OpenMPI4,
}
BANNERS = {
    Hydra: "HYDRA build details:\n    Version: 5.0.2",
    IntelMPI: "Intel(R) MPI Library for Linux* OS, Version 2021.18",
    OpenMPI: "mpirun (Open MPI) 5.0.11",
    OpenMPI4: "mpirun (Open MPI) 4.1.4",
}


def install(folder, banner: str) -> str:
    """A program called mpirun that says this of itself."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\necho '{banner}'\n")
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def only_path(monkeypatch):
    """Look in the folders of PATH alone, not beside this Python."""

    def look_in(*folders):
        monkeypatch.setattr(finding, "_search_path", lambda files: [str(folder) for folder in folders])

    return look_in


@pytest.mark.parametrize("version, kind", VERSIONS.items())
def test_the_launcher_of_the_library_is_chosen_past_those_of_others(version, kind, tmp_path, only_path):
    others = [install(tmp_path / other.__name__, BANNERS[other]) for other in BANNERS if other is not kind]
    mine = install(tmp_path / "mine", BANNERS[kind])
    only_path(*(os.path.dirname(path) for path in (*others, mine)))
    found = finding.find_launcher(Library(version, (), "4.1.2"))
    assert type(found) is kind
    assert found.path == mine


def test_a_launcher_of_another_mpi_is_named_in_the_error(tmp_path, only_path):
    other = install(tmp_path, BANNERS[OpenMPI4])
    only_path(tmp_path)
    with pytest.raises(LaunchError, match=r"belongs to MPICH Version: 5\.0\.2") as caught:
        finding.find_launcher(Library("MPICH Version: 5.0.2", (), "4.1.2"))
    assert other in str(caught.value)
    assert "(Open MPI) 4.1.4" in str(caught.value)


def test_a_library_that_no_launcher_knows():
    with pytest.raises(LaunchError, match=r"Fantasy MPI 1\.0; no launcher is known"):
        finding.find_launcher(Library("Fantasy MPI 1.0", (), "4.1.2"))


def test_a_launcher_that_does_not_fit_the_library():
    with pytest.raises(LaunchError, match="'openmpi' was asked for"):
        finding.find_launcher(Library("MPICH Version: 5.0.2", (), "4.1.2"), name="openmpi")


def test_the_folders_beside_the_library_are_searched():
    folders = finding._search_path(["/opt/mpi/lib/x86_64/libmpi.so.12"])
    assert folders.index("/opt/mpi/lib/bin") < folders.index("/opt/mpi/bin")
    assert folders[0] == os.path.dirname(sys.executable)


def test_without_an_mpi_library_the_error_says_what_to_install(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'RuntimeError: cannot load MPI library' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(MPIMissingError, match=r"cannot load MPI library.*pip install mpich"):
        finding.find_library(str(python))


def test_debians_mpich_is_made_known_to_mpi4py_by_the_commands_that_are_printed(tmp_path):
    system = tmp_path / "usr"
    library = system / "x86_64-linux-gnu" / "libmpich.so.12"
    library.parent.mkdir(parents=True)
    library.touch()
    assert "libmpich" not in how_to_have_one(tmp_path)
    commands = how_to_have_one(system).rpartition("give it: ")[2]
    for _ in range(2):  # and once more does no harm
        subprocess.run(["bash", "-c", commands], env={"HOME": str(tmp_path)}, check=True)
    assert (tmp_path / "mpich" / "libmpi.so.12").resolve() == library


@pytest.mark.parametrize("kind", [IntelMPI, Slurm])
def test_unequal_slots_are_refused_where_a_launcher_has_no_words_for_them(kind):
    hosts = (Host("a", 1), Host("b", 2))
    with pytest.raises(LaunchError, match=r"as many ranks on one host as on another, but the slots are a:1, b:2"):
        kind("launcher").command(dataclasses.replace(job(3), hosts=hosts))


SLURM = """#!/bin/sh
case "$*" in
--version) echo slurm 22.05.8 ;;
--mpi=list) echo "MPI plugin types are..."; printf "\\t%s\\n" {plugins} >&2 ;;
"show config") printf "{settings}" ;;
esac
"""


@pytest.mark.parametrize(
    ("version", "plugins", "settings", "plugin"),
    [
        ("MPICH Version: 5.0.2", "none pmi2 pmix", "MpiDefault              = none\\n", "pmi2"),
        ("Intel(R) MPI Library 2021.18", "none pmi2 pmix", "", "pmi2"),
        ("Open MPI v5.0.11", "none pmi2 pmix", "", "pmix"),
        ("Open MPI v4.1.4", "none pmi2", "", None),
        ("MPICH Version: 5.0.2", "none pmi2 pmix", "Licenses = pmi2\\nMpiDefault = pmix_v4\\n", None),
    ],
)
def test_slurm_gets_the_plugin_of_the_library_unless_the_site_has_a_default(
    tmp_path, monkeypatch, version, plugins, settings, plugin
):
    for program in ("srun", "scontrol"):
        (tmp_path / program).write_text(SLURM.format(plugins=plugins, settings=settings))
        (tmp_path / program).chmod(0o755)
    monkeypatch.setattr(finding, "_search_path", lambda files: [str(tmp_path)])
    launcher = finding.find_launcher(Library(version, (), "4.1.2"), name="slurm")
    assert launcher.environment(job()) == ({} if plugin is None else {"SLURM_MPI_TYPE": plugin})
