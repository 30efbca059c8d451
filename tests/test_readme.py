"""What README.md shows is true: its snippets run, its diff is the examples', its links lead somewhere."""

from __future__ import annotations

import difflib
import importlib.util
import re

import pytest

from tests.launch import ROOT, run_ranks

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
FENCES = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SNIPPETS = [code for language, code in FENCES if language == "python"]


@pytest.mark.parametrize("code", SNIPPETS, ids=lambda code: code.strip().splitlines()[-1][:40])
def test_a_snippet_runs_on_two_ranks(code):
    for framework in ("torch", "tensorflow", "keras"):
        if re.search(rf"import (horo_lite\.)?{framework}\b", code) and importlib.util.find_spec(framework) is None:
            pytest.skip(f"{framework} is not installed")
    done = run_ranks(code, 2, limit_s=90)
    assert done.returncode == 0, done.output


def test_the_diff_is_that_of_the_example():
    (shown,) = [code for language, code in FENCES if language == "diff"]
    scripts = ("torch_digits.py", "torch_digits_distributed.py")
    plain, twin = ((ROOT / "examples" / script).read_text().splitlines() for script in scripts)
    real = list(difflib.unified_diff(plain, twin, lineterm=""))
    wrong = [line for line in shown.splitlines() if line[0] in "+-" and line not in real]
    assert not wrong


def test_sentence_install_diff_and_output_come_first():
    start = TEXT.splitlines()[:45]
    for wanted in ("pip install", "```diff", "mpirun -np 2", "$ make demo", "demo passed"):
        assert any(wanted in line for line in start), wanted


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert links and not missing


def test_commands_of_the_makefile_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)", TEXT)) <= targets
