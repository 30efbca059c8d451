"""The rules that keep the layers apart, read from the source without importing it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "horo_lite"
SOURCES = sorted(PACKAGE.rglob("*.py"))

BASE = {"errors", "config", "interfaces", "log", "version"}
STAGES = {"transport", "compression", "buckets", "collectives"}
ADAPTERS = {"torch", "tensorflow", "keras"}

# A part of the package may import itself and these parts; the command line may import anything.
MAY_IMPORT = {
    **dict.fromkeys(BASE, BASE),
    "arrays": BASE,
    "transport": BASE | {"arrays"},
    "compression": BASE | {"arrays"},
    "buckets": BASE | {"arrays"},
    "collectives": BASE,  # reductions are passed in, a transport is seen through interfaces only
    "engine": BASE | STAGES | {"arrays"},
    # These make the world and the lanes in it, and so need its transport.
    "context": BASE | STAGES | {"arrays", "engine", "launch_check", "log", "process_sets", "process_set_table"},
    "process_set_table": BASE | {"engine", "process_sets", "transport"},
}
ABOVE_ENGINE_MUST_NOT = {"transport", "collectives"}
UNRELATED = {"torch": {"tensorflow", "keras"}, "tensorflow": {"torch"}}
IMPORTS_MPI4PY = re.compile(r"^\s*(import|from) mpi4py\b", re.MULTILINE)
FRAMEWORKS = {
    "torch": {"torch"},
    "tensorflow": {"tensorflow", "keras"},
    "keras": {"tensorflow", "keras", "torch", "jax"},
    "jax": set[str](),
}


class Import(NamedTuple):
    file: Path
    line: int
    module: str
    at_top: bool
    """False inside a function: it happens when that is called, if ever."""

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> Iterator[Import]:
    """Every import that runs; one under ``if TYPE_CHECKING`` does not."""
    tree = parse(path)
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            child.nested = getattr(node, "nested", False) or inside  # type: ignore[attr-defined]
            child.for_types = getattr(node, "for_types", False) or (  # type: ignore[attr-defined]
                isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") and child in node.body
            )
        if getattr(node, "for_types", False):
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name, not node.nested)  # type: ignore[attr-defined]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                package = path.relative_to(ROOT).parts[: -node.level]
                module = ".".join([*package, *filter(None, [node.module])])
            else:
                module = node.module or ""
            for alias in node.names:
                name = f"{module}.{alias.name}" if _is_module(f"{module}.{alias.name}") else module
                yield Import(path, node.lineno, name, not node.nested)  # type: ignore[attr-defined]


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def part(path: Path) -> str:
    """The folder or module directly under horo_lite that a file belongs to."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_part(found: Import) -> str | None:
    words = found.module.split(".")
    return words[1] if words[0] == "horo_lite" and len(words) > 1 else None


@functools.cache
def all_imports() -> list[Import]:
    return [found for path in SOURCES for found in imports(path)]


def test_layers_import_only_what_lies_below_them():
    wrong = []
    for found in all_imports():
        user, used = part(found.file), imported_part(found)
        if used is None or used == user or user == "cli":
            continue
        if user in MAY_IMPORT:
            allowed = used in MAY_IMPORT[user]
        else:
            allowed = used not in ABOVE_ENGINE_MUST_NOT | UNRELATED.get(user, set()) | {"cli"}
        if not allowed:
            wrong.append(f"{found}: {user} must not see {used}")
    assert not wrong, "\n".join(wrong)


def test_mpi4py_is_imported_in_one_file_when_it_is_needed():
    users = [found for found in all_imports() if found.module.split(".")[0] == "mpi4py"]
    elsewhere = [str(found) for found in users if found.file != PACKAGE / "transport" / "mpi.py"]
    elsewhere += [
        f"{path.relative_to(ROOT)}:{node.lineno} has a program that imports mpi4py"
        for path in SOURCES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and IMPORTS_MPI4PY.search(node.value)
    ]
    assert not elsewhere, "\n".join(elsewhere)


def test_parts_do_not_import_one_another_in_circles():
    """When they are loaded; ``horo_lite`` itself stands for its ``__init__``. Horovod's second name of the Keras
    adapter, a folder of the TensorFlow one, is above both.
    """
    second_name = PACKAGE / "tensorflow" / "keras"
    below: dict[str, set[str]] = {}
    for found in all_imports():
        user, used = part(found.file), "__init__" if found.module == "horo_lite" else imported_part(found)
        if used not in (None, user) and found.at_top and not found.file.is_relative_to(second_name):
            below.setdefault(user, set()).add(used)
    circles = [f"{one} and {other}" for one in below for other in reached(below, one) if one in reached(below, other)]
    assert not circles, "\n".join(sorted(circles))


def reached(below: dict[str, set[str]], start: str) -> set[str]:
    """Everything that a part of the package imports, and what that imports."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for used in below.get(waiting.pop(), set()) - found:
            found.add(used)
            waiting.append(used)
    return found - {start}


def test_a_framework_is_imported_by_its_own_adapter_alone():
    wrong = []
    for found in all_imports():
        framework, user = found.module.split(".")[0], part(found.file)
        # A function may import what its argument proves to be there (a kernel for torch tensors).
        if framework in FRAMEWORKS and found.at_top and framework not in FRAMEWORKS.get(user, set()):
            wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_the_environment_is_read_in_config_alone():
    wrong = []
    for path in SOURCES:
        if path == PACKAGE / "config.py" or part(path) == "cli":  # the command line builds its children's environment
            continue
        for node in ast.walk(parse(path)):
            name = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""
            if name in {"os.environ", "os.getenv", "environ", "getenv", "os.environb"}:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} reads {name}")
    assert not wrong, "\n".join(wrong)


def test_no_assert_and_no_print_in_library_code():
    wrong = []
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            printed = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            if isinstance(node, ast.Assert) or (printed and part(path) != "cli"):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:60]}")
    assert not wrong, "\n".join(wrong)


def test_no_module_is_called_utils():
    assert not [path for path in SOURCES if path.stem in {"utils", "util", "helpers", "misc", "common_utils"}]


def undocumented(body: list[ast.stmt], where: str) -> Iterator[str]:
    """Public classes and functions without a docstring; a method that implements an interface has its text there."""
    for node in body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
            continue
        documented = ast.get_docstring(node) is not None or any(
            "overload" in ast.unparse(mark) or "setter" in ast.unparse(mark) for mark in node.decorator_list
        )
        if not documented:
            yield f"{where}:{node.lineno} {node.name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_public_symbol_is_documented(path):
    tree = parse(path)
    where = str(path.relative_to(ROOT))
    assert not path.read_text(encoding="utf-8").strip() or ast.get_docstring(tree), f"{where} has no docstring"
    missing = list(undocumented(tree.body, where))
    assert not missing, "\n".join(missing)


def test_every_source_file_defers_its_annotations():
    """The oldest Python that is supported cannot evaluate all of them."""
    late = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in ast.walk(parse(path)))
        and "from __future__ import annotations" not in path.read_text(encoding="utf-8")
    ]
    assert not late, "\n".join(late)
