"""The only package that sees all stages of the data path: queue, order, agreement, handles, faults.

``Engine`` drives lanes; a process set has a ``NamedLane`` (any order, matched by name, agreed before data moves) and
planned operations (a fixed order, agreed once); a ``Fabric`` gives them transport and algorithms.
"""

from __future__ import annotations

from horo_lite.engine.engine import Engine
from horo_lite.engine.fabric import Fabric
from horo_lite.engine.handles import Handle
from horo_lite.engine.instruments import Instruments, WireStats
from horo_lite.engine.named import NamedLane
from horo_lite.engine.planned import PlannedLane

__all__ = ["Engine", "Fabric", "Handle", "Instruments", "NamedLane", "PlannedLane", "WireStats"]
