"""docs/environment.md is what docs/make_environment.py writes."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_up_to_date():
    written = (DOCS / "environment.md").read_text(encoding="utf-8")
    page = runpy.run_path(str(DOCS / "make_environment.py"))["page"]
    assert written == page(), "run: python docs/make_environment.py"
