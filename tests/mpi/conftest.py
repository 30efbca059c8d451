"""Tests that run under mpirun: ordinary functions, run on every rank, each asserting there.

``hvd`` is the front end that the file is for, initialised. ``@pytest.mark.ranks(2, 3)`` chooses the numbers of ranks.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.mpi.runner import plan
from tests.mpi.runner.inner import Inner
from tests.mpi.runner.outer import Outer


def pytest_configure(config: pytest.Config) -> None:
    folder = plan.inner_folder()
    config.pluginmanager.register(Inner(folder) if folder else Outer(), "horo-lite-mpi-runner")


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test here becomes one per number of ranks: ``test_sum[np3]``.

    First of all plugins, so that the identifiers are the same whether this file is loaded before or during collection.
    """
    mark = metafunc.definition.get_closest_marker("ranks")
    metafunc.fixturenames.append("world")
    metafunc.parametrize("world", mark.args if mark else plan.DEFAULT_RANKS, ids=lambda ranks: f"np{ranks}")


@pytest.fixture
def hvd(request: pytest.FixtureRequest, world: int) -> Any:
    """The front end under test, initialised; the same module whichever test of the job runs."""
    module = importlib.import_module(plan.front_end(request.path).module)
    if not module.is_initialized():
        module.init()
    assert module.size() == world, "this job's ranks do not see one another"
    return module
