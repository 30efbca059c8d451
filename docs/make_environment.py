"""Writes docs/environment.md from ``horo_lite/config.py``: ``python docs/make_environment.py``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from horo_lite.config import Config

PAGE = Path(__file__).with_name("environment.md")

_HEAD = """# Environment variables

Read once, when `init()` is called. Where Horovod has a variable of the same meaning it is read as well; horo_lite's
wins. Those that decide what ranks send to one another must be the same on all of them; `init()` compares them. A value
that can't be read is an error that names the variable. This page is written by `docs/make_environment.py`.

| variable | default | meaning | Horovod's name |
|---|---|---|---|
"""

_TAIL = """
`HOROVOD_STALL_CHECK_DISABLE=1` is read as `HORO_LITE_STALL_WARN_S=0`. `OMP_NUM_THREADS` is left as it is; without it
torch is given cores / ranks of its node when `init()` is called after `import torch`, and `horo-lite run` sets it for
all libraries.

`init()` also reads what launchers set (`PMI_SIZE`, `OMPI_COMM_WORLD_SIZE`, `SLURM_STEP_NUM_TASKS`) to find out that
another MPI's launcher was used, and sets `HORO_LITE_RANK_PID`, by which processes that a rank starts know that they are
no ranks.
"""


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(f"{_row(field)}\n" for field in dataclasses.fields(Config)) + _TAIL


def _row(field: dataclasses.Field) -> str:
    variable, meaning, horovod = (field.metadata[key] or "" for key in ("variable", "doc", "horovod"))
    horovod = horovod and f"`{horovod}`"
    return f"| `{variable}` | {_shown(field.default)} | {meaning.replace('|', '')} | {horovod} |"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) or "(empty)"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
