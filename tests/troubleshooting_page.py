"""What docs/troubleshooting.md lists: its headings and the first columns of its tables."""

from __future__ import annotations

import re

from tests.launch import ROOT

_PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
_OURS, _OF_MPI = _PAGE.split("## Messages of the MPI libraries")

HEADINGS = re.findall(r"^### `(.*)`$", _OURS, re.MULTILINE)


def _rows(text: str) -> list[str]:
    firsts = re.findall(r"^\| (`.*?) \| ", text, re.MULTILINE)
    return [message for first in firsts for message in re.findall("`([^`]+)`", first)]


ROWS = _rows(_OURS)
MPI_ROWS = _rows(_OF_MPI)


def pattern(message: str) -> str:
    """A regular expression for what a job prints: the page writes … for what differs, MPI libraries' rows ... ."""
    return re.escape(message).replace("…", ".*").replace(r"\.\.\.", ".*")
