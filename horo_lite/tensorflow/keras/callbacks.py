"""The module ``horo_lite.keras.callbacks`` under Horovod's other name."""

from __future__ import annotations

from horo_lite.keras.callbacks import *  # noqa: F403
