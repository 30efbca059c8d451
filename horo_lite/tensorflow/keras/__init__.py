"""``horo_lite.keras`` under Horovod's other name: ``import horo_lite.tensorflow.keras as hvd``."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    import horo_lite.keras

    if name == "elastic":
        import horo_lite.keras.elastic
    return getattr(horo_lite.keras, name)


def __dir__() -> list[str]:
    import horo_lite.keras

    return sorted(name for name in vars(horo_lite.keras) if not name.startswith("_"))
