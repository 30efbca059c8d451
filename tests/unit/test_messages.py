"""No message of ours that a job can meet is missing in docs/troubleshooting.md.

The sources are searched for errors that are made and lines that are logged. A text is explained when the page has a
part of it. Wrong arguments are left out: such an error ends a traceback that shows the call, and says what was
expected.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import horo_lite
from horo_lite import errors
from tests.troubleshooting_page import HEADINGS, ROWS, pattern

PACKAGE = Path(horo_lite.__file__).parent
LOGGING = {"warning", "info", "error", "exception", "critical", "warn", "write_tagged", "_say", "fail", "forbid"}
ARGUMENTS = {"ArgumentError", "ArgumentTypeError"}
OTHERS = {"SharedMemoryError", "RuntimeError", "OSError"}
ERRORS = {name for name in dir(errors) if name.endswith(("Error", "Interrupt"))} - ARGUMENTS | OTHERS
WORDS = re.compile(r"[a-z]{2,} [a-z]{2,}")
SENTENCE = re.compile(r"[a-z]{2,} [a-z]{2,} [a-z]{2,}")

# Of these files all texts count: they are handed on, and become an error or a line elsewhere.
TEXTS = {
    "engine/agreement.py", "engine/coordinator.py", "engine/desync.py", "engine/planned.py", "engine/faults/inquiry.py",
    "torch/agreement.py",
}

# What is put together from parts, by a part that the source has.
PARTS = {
    "ended by …, while at": "ended by SIGTERM, while at",
    "…\nThis is said once, after": "… has waited for … s: rank … has not submitted it",
    "…\nThe job ends now": "The job ends now (HORO_LITE_STALL_ABORT_S is over; 0 is never)",
    "… has waited for … s: …": "… has waited for … s: rank … has not submitted it",
    "tensor …: mismatched …: …": "DisagreementError: tensor …: mismatched …: rank 0: …; rank 1: …",
    "init(): ranks have different …": "DisagreementError: init(): ranks have different …",
    "…=… says that … started … processes":
        "says that … started … processes, but in the MPI library … each is rank 0 of 1",
    "one process; to train on 4: …": "one process; to train on 4: horo-lite run -np 4 python …",
    "… ranks share … core…": "… ranks share … core",
    "the MPI library is …; …": "no launcher is known for it",
    "expected … …, but … … was sent": "expected … […], but … […] was sent",
    "failed on rank 0": "save_checkpoint(…) failed on rank 0: …",
    "run(…, np=…): the job ended": "run(…): the job ended with status …",
    "optimizer.step() called without": "optimizer.step() called without optimizer.skip_synchronize() context",
}

# What the page need not explain, by a part of it, and why.
EXEMPT = {
    "in thread …:": "a traceback follows",
    "rank … is at (innermost call last)": "belongs to the lines above it",
    "…left with exit status": "as its heading",
    "will not take part any more. Where": "belongs to a report of the stall watch",
    "all ranks have submitted it, but messages do not arrive": "belongs to a report of the stall watch, says why",
    "but this process goes on alone (HORO_LITE_ALLOW_SINGLE)": "the user has asked for it",
    "MPI is not given device memory": "a note on speed that says why",
    "MPI takes device memory": "a note",
    "does not support eager execution: please use": "Horovod's words, and says what to use",
    "was for sessions and estimators": "says what to use",
    "is not the shared memory": "the reason in: this node's ranks share no memory",
    "is not a private file of user": "the reason in: this node's ranks share no memory",
    "did not load the MPI library within": "says what to do",
    "Parameter `num_groups` has been replaced": "Horovod's words, and says by what",
    "(injected)": "for tests",
    "rank …… is at (innermost call last)": "belongs to a report of the stall watch",
    "the making of a new plan": "belongs to: ranks are out of step",
}

# These raise errors only in tests and in ``horo-lite simulate``.
SIMULATION = {"transport/simulator.py", "transport/interleaver.py", "transport/loopback.py"}


class Said(NamedTuple):
    """One text of the sources, with … for what is filled in."""

    file: str
    line: int
    text: str


def text_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[-.0-9]*[a-z]", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.Call):  # "...".format()
        return text_of(node.func.value) if isinstance(node.func, ast.Attribute) else "…"
    return "…"


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def constants(tree: ast.Module) -> dict[str, str]:
    """Texts that a module gives a name."""
    return {
        target.id: text_of(node.value) for node in tree.body if isinstance(node, ast.Assign)
        for target in node.targets if isinstance(target, ast.Name)
    }


@functools.cache
def everything_said() -> list[Said]:
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        file, tree = str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))
        named = constants(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and name_of(node) in LOGGING | ERRORS:
                for argument in node.args:
                    named_text = named.get(argument.id, "…") if isinstance(argument, ast.Name) else ""
                    found.add(Said(file, node.lineno, named_text or text_of(argument)))
            elif file in TEXTS:
                text = text_of(node) if isinstance(node, ast.JoinedStr) else ""
                if isinstance(node, ast.Return) and node.value is not None:
                    text = text_of(node.value)
                if SENTENCE.search(text):
                    found.add(Said(file, node.lineno, text))
    return sorted(said for said in found if WORDS.search(said.text) and said.file not in SIMULATION)


def is_explained(text: str) -> bool:
    known = [*HEADINGS, *ROWS]
    return any(re.search(pattern(message), text, re.DOTALL) for message in known) or any(part in text for part in PARTS)


def test_every_message_is_explained_or_need_not_be():
    unexplained = [said for said in everything_said() if not is_explained(said.text)]
    missing = [said for said in unexplained if not any(part in said.text for part in EXEMPT)]
    assert not missing, "explain these in docs/troubleshooting.md:\n" + "\n".join(
        f"{said.file}:{said.line}: {said.text!r}" for said in missing
    )


def test_no_exception_outlives_its_message():
    texts = "\0".join(said.text for said in everything_said())
    assert [part for part in [*EXEMPT, *PARTS] if part not in texts] == []
    assert set(PARTS.values()) <= {*HEADINGS, *ROWS}


def test_a_new_message_would_be_found():
    assert len(everything_said()) > 80
    assert not is_explained("the machine is on fire: …")
    assert any("has vanished without a word" in said.text for said in everything_said())
