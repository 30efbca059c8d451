"""Whether the MPI library takes device pointers, and what a tensor needs before it is handed one.

A library that does not know devices reads the pointer as host memory: a segmentation fault. So nothing is guessed:
``HORO_LITE_CUDA_AWARE=on`` is the user's word, and ``probe`` lets a child process try it, whose crash is an answer.
"""

from __future__ import annotations

import functools
import logging
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from horo_lite.arrays import as_bytes, is_torch
from horo_lite.config import forget_launcher
from horo_lite.interfaces import Array

_CHILD = (
    sys.executable, "-c", "import sys; from horo_lite.transport import cuda; sys.exit(cuda.exchange_with_itself())"
)
_CHILD_S = 60.0  # it imports torch and starts CUDA
_NO_DEVICE, _WRONG_DATA = 3, 4
_SIZES_BYTES = (64, 1 << 20, 16 << 20)  # short, rendezvous and pipelined messages take different ways
_log = logging.getLogger("horo_lite")


def is_aware(setting: str) -> bool:
    """What ``HORO_LITE_CUDA_AWARE`` comes to on this process.

    Args:
        setting: "off", "on" or "probe".
    """
    if setting != "probe":
        return setting == "on"
    reason = why_not()
    if reason:
        _log.info("MPI is not given device memory (%s): device tensors go through pinned host memory", reason)
    else:
        _log.info("MPI takes device memory: tried by a child process")
    return not reason


@functools.cache
def why_not(child: Sequence[str] = _CHILD) -> str:
    """Let a child process exchange device memory with itself; "" when it came through, else what happened to it."""
    try:
        done = subprocess.run(
            child, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_CHILD_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"the child that tried it did not end within {_CHILD_S:.0f} s"
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"the child that tried it was ended by {signal.Signals(-done.returncode).name}"
    known = {_NO_DEVICE: "torch sees no CUDA device", _WRONG_DATA: "the child that tried it received other data"}
    last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
    return known.get(done.returncode, f"the child that tried it failed: {last[0]}")


def for_mpi(buffer: Array) -> Array:
    """The memory of a flat device tensor as MPI is to see it: bytes that no kernel of this thread still works on."""
    if is_torch(buffer) and buffer.is_cuda:
        torch: Any = sys.modules["torch"]
        torch.cuda.current_stream(buffer.device).synchronize()
    return as_bytes(buffer)


def exchange_with_itself() -> int:
    """What the child does: a world of one sends device memory to itself. Returns its exit status, 0 for success."""
    forget_launcher()
    import torch

    if not torch.cuda.is_available():
        return _NO_DEVICE
    from horo_lite.transport.mpi import load_mpi

    comm = load_mpi().COMM_SELF
    for size in _SIZES_BYTES:
        source = torch.arange(size, device="cuda").to(torch.uint8)
        target = torch.zeros_like(source)
        torch.cuda.synchronize()
        comm.Sendrecv(source, 0, recvbuf=target, source=0)
        if not torch.equal(source, target):
            return _WRONG_DATA
    return 0

