"""The module ``horo_lite.keras.elastic`` under Horovod's other name."""

from __future__ import annotations

from horo_lite.keras.elastic import *  # noqa: F403
