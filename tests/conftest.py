"""What all tests share."""

from __future__ import annotations

import pytest

from horo_lite.config import Config


@pytest.fixture(scope="session")
def device() -> str:
    """Where tests put their tensors: "cpu", or "cuda" with HORO_LITE_TEST_DEVICE=cuda."""
    return Config.from_environment().test_device
