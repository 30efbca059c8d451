"""A test with parameters of its own and of its fixture, whose identifier every pytest must make alike."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.ranks(2)


@pytest.fixture(params=["left", "right"])
def side(request):
    return request.param


@pytest.mark.parametrize("number", [1, 2])
def test_both(hvd, side, number):
    assert hvd.size() == 2
