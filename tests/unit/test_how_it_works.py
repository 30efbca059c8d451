"""The code in docs/how-it-works.md runs and prints what the page says, and the files that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-it-works.md"


def test_the_all_reduce_of_the_page(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    promised = [line.split("#", 1)[1].strip() for line in code.splitlines() if line.startswith("print(")]
    assert capsys.readouterr().out.splitlines() == promised


def test_the_files_that_the_page_names_are_there():
    page = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:horo_lite/)?((?:[a-z_]+/)*[a-z_]+\.py|(?:[a-z_]+/)+)`", page))
    assert {"interfaces.py", "torch/gradients.py", "functions/", "engine/operations/"} <= named
    assert not [name for name in named if not (PAGE.parents[1] / "horo_lite" / name).exists()]


def test_the_driver_is_as_short_as_the_page_says():
    (path, said) = re.search(r"`(transport/driver\.py)`, (\d+) lines", PAGE.read_text(encoding="utf-8")).groups()
    lines = (PAGE.parents[1] / "horo_lite" / path).read_text(encoding="utf-8").splitlines()
    assert abs(len(lines) - int(said)) <= 10
