"""A file that no rank can import."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.ranks(2)

if "HORO_LITE_TEST_FOLDER" in os.environ:
    raise ImportError("broken on purpose")


def test_one():
    pass


def test_two():
    pass
