"""Every setting, read from the environment once, in one place.

``Config`` is frozen; each field carries its variable, unit and meaning, and the reference page (docs/environment.md)
is generated from them. Where Horovod has a variable of the same meaning it is read too; ours wins.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from horo_lite.errors import ArgumentError

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}
_FIRST_FACTOR = 3
_FOLDER_VARIABLE = "HORO_LITE_UNDER_WAY_FOLDER"
_TAKEN = re.compile(r"(\d+):(.+)")


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError("expected 1 or 0")


def _seconds(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise ValueError("expected a number of seconds, 0 for never")
    return value


def _positive(text: str) -> int:
    value = int(float(text))
    if value <= 0:
        raise ValueError("expected a positive number")
    return value


def _not_negative(text: str) -> int:
    value = int(float(text))
    if value < 0:
        raise ValueError("expected a number, 0 or more")
    return value


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return text.lower()

    return parse


def _fault(text: str) -> str:
    rank, messages, what = text.split(":")
    if not (rank.isdigit() and messages.isdigit()):
        raise ValueError("expected rank:messages:what, such as 1:20:kill")
    return f"{rank}:{messages}:{_choice('kill', 'exit', 'stop', 'lose', 'cut', 'delay')(what)}"


def _level(text: str) -> str:
    names = {"trace": "debug", "fatal": "error"}
    level = names.get(text.lower(), text.lower())
    return _choice("debug", "info", "warning", "error")(level)


def _unless_of_another(text: str) -> str:
    taken = _TAKEN.fullmatch(text)
    if taken is None:
        return text
    return taken[2] if int(taken[1]) == os.getpid() else ""


def setting(
    default: Any, variable: str, doc: str, parse: Callable[[str], Any] = str, horovod: str | None = None
) -> Any:
    """One field of ``Config``: its default, its variable, what it means, how its text is read, Horovod's name."""
    metadata = {"variable": variable, "doc": doc, "parse": parse, "horovod": horovod}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of one process; ``Config.from_environment()`` reads them when ``init()`` is called."""

    log_level: str = setting(
        "info", "HORO_LITE_LOG_LEVEL", "What is logged: debug, info, warning or error.", _level, "HOROVOD_LOG_LEVEL"
    )
    stall_warn_s: float = setting(
        20.0, "HORO_LITE_STALL_WARN_S",
        "Seconds until a waiting operation is reported with the missing ranks and what they do; 0 is never.",
        _seconds, "HOROVOD_STALL_CHECK_TIME_SECONDS",
    )
    stall_abort_s: float = setting(
        600.0, "HORO_LITE_STALL_ABORT_S", "Seconds until a waiting operation ends the job; 0 is never.",
        _seconds, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    )
    algorithm: str = setting(
        "auto", "HORO_LITE_ALGORITHM",
        "The all-reduce algorithm for every message, or auto: chosen by a table of message size and ranks.",
    )
    bucket_bytes: int = setting(
        32 << 20, "HORO_LITE_BUCKET_BYTES", "Gradients are reduced together in buckets of about this many bytes.",
        _not_negative, "HOROVOD_FUSION_THRESHOLD",
    )
    chunk_elements: int = setting(
        1 << 30, "HORO_LITE_CHUNK_ELEMENTS", "The largest number of elements handed to MPI in one message.", _positive
    )
    segment_bytes: int = setting(
        1 << 20, "HORO_LITE_SEGMENT_BYTES", "The pieces in which a ring pipelines a chunk.", _positive
    )
    shared_memory: bool = setting(
        True, "HORO_LITE_SHARED_MEMORY", "Use memory shared by the ranks of a node where there is room (1 or 0).",
        _boolean,
    )
    overlap: str = setting(
        "auto", "HORO_LITE_OVERLAP",
        "Reduce buckets while backward goes on: auto (where it pays), on or off.", _choice("auto", "on", "off"),
    )
    keep_freed_bytes: int = setting(
        1 << 30, "HORO_LITE_KEEP_FREED_BYTES",
        "Once gradients are exchanged on CPUs, glibc's malloc keeps about so much freed memory for the next step; "
        "0 leaves malloc as it is.",
        _not_negative,
    )
    cache_folder: str = setting(
        "~/.cache/horo_lite", "HORO_LITE_CACHE_FOLDER",
        "Where the measured choice of algorithms is kept for each set of hosts; empty: nowhere.",
    )
    cuda_aware: str = setting(
        "off", "HORO_LITE_CUDA_AWARE",
        "Hand device pointers to MPI: off, on (trusted as it is), or probe (a child process tries it first).",
        _choice("off", "on", "probe"),
    )
    timeline: str = setting(
        "", "HORO_LITE_TIMELINE",
        "Write a Chrome trace to this file, or DYNAMIC: wait for start_timeline().", str, "HOROVOD_TIMELINE",
    )
    timeline_mark_cycles: bool = setting(
        False, "HORO_LITE_TIMELINE_MARK_CYCLES", "Mark the engine's cycles in the trace (1 or 0).", _boolean,
        "HOROVOD_TIMELINE_MARK_CYCLES",
    )
    dynamic_process_sets: bool = setting(
        False, "HORO_LITE_DYNAMIC_PROCESS_SETS", "Allow add_process_set() after init() (1 or 0).", _boolean,
        "HOROVOD_DYNAMIC_PROCESS_SETS",
    )
    allow_single: bool = setting(
        False, "HORO_LITE_ALLOW_SINGLE",
        "Accept a world of one process although a launcher announced more (1 or 0).", _boolean,
    )
    under_way_folder: str = setting(
        "", _FOLDER_VARIABLE,
        "Set by `horo-lite run` for ranks of its own machine: where each notes that it has not come to its end yet. "
        "A rank puts its process number in front, so that another job which it starts notes nothing there.",
        _unless_of_another,
    )
    test_fault: str = setting(
        "", "HORO_LITE_TEST_FAULT",
        "For tests: rank:messages:what makes a rank fail once it has sent so many messages: kill, exit, stop, lose, "
        "cut or delay.", _fault,
    )
    test_device: str = setting("cpu", "HORO_LITE_TEST_DEVICE", "The device on which the test-suite puts its tensors.")

    @property
    def first_stall_limits_s(self) -> tuple[float, float]:
        """Until a warning and until the end for what waits for imports, compilers and caches of other ranks.

        A limit that was set is taken at its word.
        """
        warn_s, abort_s = (
            _FIRST_FACTOR * limit if limit == default else limit
            for limit, default in ((self.stall_warn_s, Config.stall_warn_s), (self.stall_abort_s, Config.stall_abort_s))
        )
        return warn_s, abort_s

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read the settings.

        Args:
            environ: the variables; the process environment when None.

        Raises:
            ArgumentError: a variable holds a value that its setting cannot take; names the variable and the value.
        """
        variables = os.environ if environ is None else environ
        values = {}
        for field in dataclasses.fields(cls):
            for variable in (field.metadata["variable"], field.metadata["horovod"]):
                text = variables.get(variable) if variable else None
                if text is None:
                    continue
                try:
                    values[field.name] = field.metadata["parse"](text.strip())
                except ValueError as error:
                    raise ArgumentError(f"{variable}={text!r}: {error}. {field.metadata['doc']}") from None
                break
        if _says(variables, "HOROVOD_STALL_CHECK_DISABLE") and "HORO_LITE_STALL_WARN_S" not in variables:
            values["stall_warn_s"] = 0.0
        return cls(**values)


def _says(variables: Mapping[str, str], name: str) -> bool:
    return variables.get(name, "0").strip().lower() in _TRUE


# --- What the launcher has set: read here as well, but no setting of ours ----------------------------------------

_ANNOUNCED = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")  # SLURM_NTASKS is set by a mere allocation
_RANK_VARIABLE = "HORO_LITE_RANK_PID"
_LAUNCHER_PREFIXES = (
    "PMI_", "PMIX_", "HYDI_", "MPIR_", "OMPI_COMM_WORLD",
    "OMPI_MCA_ess", "OMPI_MCA_orte_", "OMPI_MCA_pmix",  # Open MPI 4 would look for its daemon by these
)


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the environment says of how this process was started.

    Attributes:
        variable: the one by which a launcher says how many processes it has started; "" without a launcher.
        announced: that number, 1 without a launcher.
        is_child: this is no rank but a process that a rank has started.
        pmi_fd: the socket that Hydra hands to each rank, and that a rank's children inherit by name only.
        threads_set: the user has said how many threads a process may use.
    """

    variable: str = ""
    announced: int = 1
    is_child: bool = False
    pmi_fd: int | None = None
    threads_set: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Launch:
        """Read the launcher's variables."""
        variables = os.environ if environ is None else environ
        variable = next((name for name in _ANNOUNCED if _number(variables.get(name))), "")
        pid, _, job = variables.get(_RANK_VARIABLE, "").partition("@")
        return cls(
            variable, _number(variables.get(variable)) or 1,
            pid not in ("", str(os.getpid())) and job == variables.get("PMIX_NAMESPACE", ""),
            _number(variables.get("PMI_FD")), "OMP_NUM_THREADS" in variables,
        )


def mark_rank() -> None:
    """Let the processes that this one starts know that they are no ranks, unless another launcher starts them: then
    they are not those of this job.
    """
    os.environ[_RANK_VARIABLE] = f"{os.getpid()}@{os.environ.get('PMIX_NAMESPACE', '')}"
    folder = os.environ.get(_FOLDER_VARIABLE, "")
    if folder and _TAKEN.fullmatch(folder) is None:
        os.environ[_FOLDER_VARIABLE] = f"{os.getpid()}:{folder}"


def forget_launcher() -> None:
    """Remove what a launcher has said to the parent, so that MPI starts as a world of one here."""
    for name in [name for name in os.environ if name.startswith(_LAUNCHER_PREFIXES)]:
        del os.environ[name]


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None
