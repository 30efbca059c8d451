"""Lists of hosts with their slots, in Horovod's, MPICH's and Open MPI's ways of writing them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from horo_lite.errors import ArgumentError

_LINE = re.compile(
    r"(?P<name>[^\s:=]+)(?::(?P<short>\d+)|\s+slots\s*=\s*(?P<long>\d+))?(?:\s+max_slots\s*=\s*\d+)?"
)


class Host(NamedTuple):
    """A machine and how many ranks it takes."""

    name: str
    slots: int = 1

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """``"a:4,b:4"``."""
    return _hosts(text.split(","))


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """One host a line: ``a slots=4``, ``a:4`` or ``a``; ``#`` begins a comment."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return _hosts(line for line in lines if line)


def _hosts(entries: Iterable[str]) -> tuple[Host, ...]:
    slots: dict[str, int] = {}
    for entry in entries:
        found = _LINE.fullmatch(entry.strip())
        if found is None:
            raise ArgumentError(f"host {entry.strip()!r}: expected name, name:slots or name slots=number")
        slots[found["name"]] = slots.get(found["name"], 0) + int(found["short"] or found["long"] or 1)
    return tuple(Host(name, number) for name, number in slots.items())
