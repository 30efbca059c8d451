"""``horovodrun``'s flags: those that set something become variables, the rest is accepted and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import click


class Flag(NamedTuple):
    """One flag: the variable it sets, "" for none."""

    name: str
    variable: str = ""
    value: Callable[[Any], str] = str
    is_switch: bool = False


FLAGS = (
    Flag("--fusion-threshold-mb", "HORO_LITE_BUCKET_BYTES", lambda text: str(int(text) << 20)),
    Flag("--timeline-filename", "HORO_LITE_TIMELINE"),
    Flag("--timeline-mark-cycles", "HORO_LITE_TIMELINE_MARK_CYCLES", lambda on: "1", is_switch=True),
    Flag("--log-level", "HORO_LITE_LOG_LEVEL"),
    Flag("--stall-check-warning-time-seconds", "HORO_LITE_STALL_WARN_S"),
    Flag("--stall-check-shutdown-time-seconds", "HORO_LITE_STALL_ABORT_S"),
    Flag("--no-stall-check", "HORO_LITE_STALL_WARN_S", lambda on: "0", is_switch=True),
    *(Flag(name) for name in (
        "--start-timeout", "--cycle-time-ms", "--cache-capacity", "--thread-affinity", "--binding-args",
        "--ssh-identity-file",
    )),
    *(Flag(name, is_switch=True) for name in ("--mpi", "--gloo", "--tcp", "--disable-cache", "--autotune")),
)


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let a click command take the flags, unseen in its help; it gets them as keyword arguments."""
    for flag in FLAGS:
        command = click.option(flag.name, is_flag=flag.is_switch, default=None, hidden=True)(command)
    return command


def variables(values: dict[str, Any]) -> dict[str, str]:
    """What the given flags set."""
    by_option = {flag.name.strip("-").replace("-", "_"): flag for flag in FLAGS}
    return {
        by_option[name].variable: by_option[name].value(value)
        for name, value in values.items() if value is not None and by_option[name].variable
    }
