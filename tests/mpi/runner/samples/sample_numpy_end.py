"""Tests that pass, in a job that does not end as it should."""

from __future__ import annotations

import atexit
import os

import pytest

pytestmark = pytest.mark.ranks(2)


def test_leaves_something_behind():
    atexit.register(os._exit, 3)
