"""The version, alone in a file that ``setup.py`` can read without importing anything."""

from __future__ import annotations

__version__ = "0.1.0"
