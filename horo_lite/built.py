"""Horovod's questions about what it was compiled with: horo_lite needs no compiler, and has MPI."""

from __future__ import annotations

from horo_lite.context import current


def mpi_built() -> bool:
    """True: MPI is what horo_lite runs on."""
    return True


def mpi_enabled() -> bool:
    """True once ``init()`` was called."""
    current()
    return True


def gloo_built() -> bool:
    """False: there is no Gloo here."""
    return False


def gloo_enabled() -> bool:
    """False: there is no Gloo here."""
    current()
    return False


def nccl_built() -> int:
    """0: device tensors go through MPI."""
    return 0


def ddl_built() -> bool:
    """False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: Intel's oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """False: no CUDA was compiled in; tensors on CUDA devices work all the same."""
    return False


def rocm_built() -> bool:
    """False: no ROCm was compiled in; tensors on its devices work all the same."""
    return False
