"""``horovodrun``'s flags: those that set something become variables; of the rest, what has no effect is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import click

from horo_lite.errors import ArgumentError


class Flag(NamedTuple):
    """One flag."""

    name: str
    variable: str = ""
    """What it sets; "" for nothing."""
    value: Callable[[Any], str] = str
    is_switch: bool = False
    values: int = 1
    other: str = ""
    """Its other name."""
    refused: str = ""
    """What to do in its place."""

    @property
    def field(self) -> str:
        return self.name.lstrip("-").replace("-", "_")


def _switches(*names: str) -> list[Flag]:
    return [Flag(name, is_switch=True) for name in names]


_FIXED_SIZE = "a job keeps its number of ranks: give -np and --hosts"

FLAGS = (
    Flag("--fusion-threshold-mb", "HORO_LITE_BUCKET_BYTES", lambda text: str(int(text) << 20)),
    Flag("--timeline-filename", "HORO_LITE_TIMELINE"),
    Flag("--timeline-mark-cycles", "HORO_LITE_TIMELINE_MARK_CYCLES", lambda on: "1", is_switch=True),
    Flag("--log-level", "HORO_LITE_LOG_LEVEL"),
    Flag("--stall-check-warning-time-seconds", "HORO_LITE_STALL_WARN_S"),
    Flag("--stall-check-shutdown-time-seconds", "HORO_LITE_STALL_ABORT_S"),
    Flag("--no-stall-check", "HORO_LITE_STALL_WARN_S", lambda on: "0", is_switch=True),
    Flag("--host-discovery-script", refused=_FIXED_SIZE),
    Flag("--config-file", refused="give its settings as flags, or as HOROVOD_ variables"),
    Flag("--check-build", is_switch=True, other="-cb", refused="horo-lite doctor tells what is there"),
    Flag("--jsrun", is_switch=True, refused="start the script by jsrun itself"),
    Flag("--min-num-proc", other="--min-np"),
    Flag("--max-num-proc", other="--max-np"),
    Flag("--blacklist-cooldown-range", values=2),
    *(Flag(name) for name in (
        "--start-timeout", "--cycle-time-ms", "--cache-capacity", "--thread-affinity", "--binding-args",
        "--slots-per-host", "--elastic-timeout", "--reset-limit", "--num-nccl-streams", "--gloo-timeout-seconds",
        "--autotune-log-file", "--autotune-warmup-samples", "--autotune-steps-per-sample",
        "--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise",
    )),
    *_switches(
        "--mpi", "--gloo", "--tcp", "--disable-cache", "--autotune", "--no-autotune", "--mpi-threads-disable",
        "--hierarchical-allreduce", "--no-hierarchical-allreduce", "--hierarchical-allgather",
        "--no-hierarchical-allgather", "--torus-allreduce", "--no-torus-allreduce", "--no-timeline-mark-cycles",
        "--stall-check", "--no-mpi-threads-disable", "--log-with-timestamp", "--log-without-timestamp",
    ),
    Flag("--prefix-output-with-timestamp", is_switch=True, other="-prefix-timestamp"),
)  # fmt: skip


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let a click command take the flags, unseen in its help; it gets them as keyword arguments."""
    for flag in FLAGS:
        names = [flag.name, *([flag.other] if flag.other else []), flag.field]
        command = click.option(*names, is_flag=flag.is_switch, nargs=flag.values, default=None, hidden=True)(command)
    return command


def variables(values: dict[str, Any]) -> dict[str, str]:
    """What the given flags set.

    Raises:
        ArgumentError: one asks for what there is not.
    """
    for flag in _given(values):
        if flag.refused:
            raise ArgumentError(f"{flag.name}: {flag.refused}")
    return {flag.variable: flag.value(values[flag.field]) for flag in _given(values) if flag.variable}


def without_effect(values: dict[str, Any]) -> list[str]:
    """The given flags that change nothing here, but for --mpi, which is so anyway."""
    return [flag.name for flag in _given(values) if not flag.variable and flag.name != "--mpi"]


def _given(values: dict[str, Any]) -> list[Flag]:
    return [flag for flag in FLAGS if values[flag.field] is not None]
