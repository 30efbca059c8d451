"""How options of the benchmarks are read."""

from __future__ import annotations

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def sizes(text: str) -> tuple[int, ...]:
    """"256,4KiB,1MiB" as numbers of bytes; for argparse's ``type``."""
    return tuple(_size(part.strip()) for part in text.split(","))


def _size(text: str) -> int:
    for unit, factor in _UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text.removesuffix("B"))
