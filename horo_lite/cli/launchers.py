"""What each MPI's launcher wants to hear: root, slots, binding and tags, one small class each.

``finding`` chooses among them. To support another launcher, write a class with these methods and add it to
``LAUNCHERS``.
"""

from __future__ import annotations

import abc
import dataclasses
import os
import shlex
from collections.abc import Sequence
from typing import ClassVar

from horo_lite.cli import machine
from horo_lite.cli.hosts import Host
from horo_lite.errors import LaunchError


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be started, in no launcher's words."""

    command: Sequence[str]
    ranks: int
    cores: int
    """Cores that the ranks of one host may use, all together; hosts are taken to be alike."""
    bind: bool = False
    tag_output: bool = True
    extra: Sequence[str] = ()
    """Options handed to the launcher as they are."""
    hosts: Sequence[Host] = ()
    """Empty for this machine, or for what SLURM has allocated."""
    allocated: int = 1
    """How many hosts that is."""
    interface: str | None = None
    """The network interface between hosts."""
    ssh: Sequence[str] = ()
    """Options for the ssh that reaches them."""
    output_folder: str | None = None
    """Each rank's output goes into files there, and not to the terminal."""
    forwarded: Sequence[str] = ()
    """Variables that ranks on other hosts need; some launchers forward all by themselves."""

    @property
    def ranks_per_host(self) -> int:
        return max((host.slots for host in self.hosts), default=-(-self.ranks // self.allocated))

    @property
    def cores_per_rank(self) -> int:
        return max(1, self.cores // self.ranks_per_host)

    @property
    def oversubscribed(self) -> bool:
        return self.ranks_per_host > self.cores

    @property
    def bound(self) -> bool:
        """Binding shared cores would pin several ranks to one of them."""
        return self.bind and not self.oversubscribed


class Launcher(abc.ABC):
    """How one MPI starts ranks. Its only field is the program's path."""

    name: ClassVar[str]
    library: ClassVar[tuple[str, ...]]
    """Beginnings of the version texts of the MPI libraries whose jobs it starts."""
    program: ClassVar[tuple[str, ...]] = ("mpirun",)
    banner: ClassVar[str]
    """What ``program --version`` prints."""
    ssh_variable: ClassVar[str] = ""
    """Where it looks for options of ssh."""

    def __init__(self, path: str) -> None:
        self.path = path

    @abc.abstractmethod
    def command(self, job: Job) -> list[str]:
        """The whole command line."""

    def environment(self, job: Job) -> dict[str, str]:
        """Variables that the launcher or its library reads; the caller's own values win."""
        return {self.ssh_variable: shlex.join(job.ssh)} if job.ssh and self.ssh_variable else {}


class Hydra(Launcher):
    """MPICH and its relatives: no flag for root, none for more ranks than cores."""

    name = "mpich"
    library: ClassVar[tuple[str, ...]] = ("MPICH", "MVAPICH")
    program: ClassVar[tuple[str, ...]] = ("mpiexec.hydra", "mpirun", "mpirun.mpich")
    banner = "HYDRA build details"
    ssh_variable = "HYDRA_LAUNCHER_EXTRA_ARGS"

    def command(self, job: Job) -> list[str]:
        binding = ["-bind-to", f"core:{job.cores_per_rank}"] if job.bound else []
        hosts = ["-hosts", ",".join(map(str, job.hosts))] if job.hosts else []
        output = self._network_and_output(job)
        return [self.path, "-np", str(job.ranks), *hosts, *output, *binding, *job.extra, *job.command]

    def _network_and_output(self, job: Job) -> list[str]:
        words = ["-iface", job.interface] if job.interface else []
        if job.output_folder:
            pattern = f"{job.output_folder}/rank.%r"
            return [*words, "-outfile-pattern", f"{pattern}.out", "-errfile-pattern", f"{pattern}.err"]
        return [*words, "-prepend-rank"] if job.tag_output else words


class IntelMPI(Hydra):
    """Intel MPI: a Hydra with its own binding, set by variables; its mpirun needs its folder on PATH."""

    name = "intelmpi"
    library = ("Intel(R) MPI",)
    program = ("mpiexec.hydra", "mpirun")
    banner = "Intel(R) MPI Library"
    ssh_variable = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"

    def command(self, job: Job) -> list[str]:
        hosts = []
        if job.hosts:
            hosts = ["-hosts", ",".join(host.name for host in job.hosts), "-ppn", str(_equal_slots(job))]
        return [self.path, "-np", str(job.ranks), *hosts, *self._network_and_output(job), *job.extra, *job.command]

    def environment(self, job: Job) -> dict[str, str]:
        folder = os.path.dirname(self.path)
        pinning = {"I_MPI_PIN_DOMAIN": f"{job.cores_per_rank}:compact"} if job.bound else {"I_MPI_PIN": "0"}
        path = {"PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
        return super().environment(job) | path | pinning


class OpenMPI(Launcher):
    """Open MPI 5, on PRRTE: refuses root and more ranks than slots, binds each rank to one core, unless told."""

    name = "openmpi"
    library = ("Open MPI v5", "Open MPI v6")
    program = ("mpirun", "mpirun.openmpi")
    banner = "(Open MPI) 5"
    ssh_variable = "PRTE_MCA_plm_ssh_args"

    def command(self, job: Job) -> list[str]:
        return [
            self.path, "-np", str(job.ranks), *self._root(), *self._hosts(job), *self._network(job), *self._tags(job),
            *self._placement(job), *job.extra, *job.command,
        ]

    def _hosts(self, job: Job) -> list[str]:
        if not job.hosts:
            return []
        forwarded = [word for name in job.forwarded for word in ("-x", name)]
        return ["--host", ",".join(map(str, job.hosts)), *forwarded]

    def _network(self, job: Job) -> list[str]:
        if job.interface is None:
            return []
        return ["--mca", "btl_tcp_if_include", job.interface, "--prtemca", "prte_if_include", job.interface]

    def environment(self, job: Job) -> dict[str, str]:
        # osc/ucx prints a line of noise on every shared window; yielding keeps an oversubscribed machine responsive.
        waiting = {"OMPI_MCA_mpi_yield_when_idle": "1"} if job.oversubscribed else {}
        return super().environment(job) | {"OMPI_MCA_osc": "^ucx"} | waiting

    def _root(self) -> list[str]:
        return ["--allow-run-as-root"] if machine.is_root() else []

    def _tags(self, job: Job) -> list[str]:
        if job.output_folder:
            return ["--output", f"dir={job.output_folder}"]
        return ["--output", "rank"] if job.tag_output else []

    def _placement(self, job: Job) -> list[str]:
        if job.bound:
            return ["--map-by", f"slot:PE={job.cores_per_rank}:OVERSUBSCRIBE", "--bind-to", "core"]
        return ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]


class OpenMPI4(OpenMPI):
    """Open MPI 4 and before, on ORTE: the same refusals, other words."""

    library = ("Open MPI v4", "Open MPI v3")
    banner = "(Open MPI) 4"
    ssh_variable = "OMPI_MCA_plm_rsh_args"

    def _tags(self, job: Job) -> list[str]:
        if job.output_folder:
            return ["--output-filename", job.output_folder]
        return ["--tag-output"] if job.tag_output else []

    def _network(self, job: Job) -> list[str]:
        if job.interface is None:
            return []
        return ["--mca", "btl_tcp_if_include", job.interface, "--mca", "oob_tcp_if_include", job.interface]

    def _placement(self, job: Job) -> list[str]:
        if job.bound:
            return ["--map-by", f"slot:PE={job.cores_per_rank}", "--bind-to", "core", "--oversubscribe"]
        return ["--oversubscribe", "--bind-to", "none"]


class Slurm(Launcher):
    """``srun`` inside an allocation; asked for by name, since most sites have an mpirun that works as well.

    Args:
        plugin: of SLURM, by which ranks find one another; None leaves that to the site.
    """

    name = "slurm"
    library = ()
    program = ("srun",)
    banner = "slurm"

    def __init__(self, path: str, plugin: str | None = None) -> None:
        super().__init__(path)
        self._plugin = plugin

    def environment(self, job: Job) -> dict[str, str]:
        return {} if self._plugin is None else {"SLURM_MPI_TYPE": self._plugin}

    def command(self, job: Job) -> list[str]:
        tags = ["--label"] if job.tag_output else []
        if job.output_folder:
            tags = [f"--output={job.output_folder}/rank.%t.out", f"--error={job.output_folder}/rank.%t.err"]
        if job.hosts:
            nodes = ",".join(host.name for host in job.hosts)
            tags += [f"--nodelist={nodes}", f"--nodes={len(job.hosts)}", f"--ntasks-per-node={_equal_slots(job)}"]
        binding = [f"--cpus-per-task={job.cores_per_rank}", "--cpu-bind=cores"] if job.bound else ["--cpu-bind=none"]
        overcommit = ["--overcommit"] if job.oversubscribed else []
        ranks = [f"--ntasks={job.ranks}", "--kill-on-bad-exit"]
        return [self.path, *ranks, *tags, *binding, *overcommit, *job.extra, *job.command]


def _equal_slots(job: Job) -> int:
    slots = {host.slots for host in job.hosts}
    if len(slots) > 1:
        raise LaunchError(
            f"this launcher starts as many ranks on one host as on another, but the slots are "
            f"{', '.join(map(str, job.hosts))}"
        )
    return slots.pop()


LAUNCHERS: tuple[type[Launcher], ...] = (Hydra, IntelMPI, OpenMPI, OpenMPI4, Slurm)
