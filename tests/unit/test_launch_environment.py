"""What a process keeps of the environment when it is no rank of the launcher that started its parent."""

from __future__ import annotations

import os

import pytest

from horo_lite.config import forget_launcher

SET_BY_A_LAUNCHER = {
    "MPICH": ["PMI_SIZE", "PMI_RANK", "PMI_FD", "HYDI_CONTROL_FD", "MPIR_CVAR_CH3"],
    "Open MPI 4": [
        "OMPI_COMM_WORLD_SIZE", "OMPI_MCA_ess", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_pmix",
        "PMIX_RANK", "PMIX_SERVER_URI2",
    ],
    "Open MPI 5": ["OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE", "PMIX_SERVER_URI41"],
}  # fmt: skip
THE_USERS = {"OMPI_MCA_btl": "tcp,self", "OMPI_ALLOW_RUN_AS_ROOT": "1", "MPI4PY_MPIABI": "mpich", "PATH": "/bin"}


@pytest.mark.parametrize("launcher", SET_BY_A_LAUNCHER)
def test_a_child_of_a_rank_forgets_the_launcher_and_nothing_else(launcher, monkeypatch):
    environment = {**THE_USERS, **dict.fromkeys(SET_BY_A_LAUNCHER[launcher], "1")}
    monkeypatch.setattr(os, "environ", environment)
    forget_launcher()
    assert environment == THE_USERS
