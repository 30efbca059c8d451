"""Arithmetic that takes virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from horo_lite.interfaces import Array, Kernel
from horo_lite.transport.network_model import NetworkModel


class Charge(Protocol):
    """Lets virtual time pass on the rank that is running (``Simulator.charge``)."""

    def __call__(self, seconds: float, combined_bytes: int = 0) -> None: ...


class TimedKernel:
    """A kernel whose calls take as long as the network model says."""

    def __init__(self, kernel: Kernel, network: NetworkModel, charge: Charge) -> None:
        self._kernel = kernel
        self._network = network
        self._charge = charge
        self.wide = kernel.wide
        self.empty = kernel.empty

    def copy(self, out: Array, source: Array) -> None:
        self._kernel.copy(out, source)
        self._charge(out.nbytes / self._network.copy_rate)

    def combine(self, out: Array, inputs: Sequence[Array], last: bool = False) -> None:
        self._kernel.combine(out, inputs, last)
        combined_bytes = out.nbytes * len(inputs)
        self._charge(combined_bytes / self._network.reduce_rate, combined_bytes)

    def inner(self, a: Array, b: Array) -> float:
        self._charge((a.nbytes + b.nbytes) / self._network.reduce_rate)
        return self._kernel.inner(a, b)

    def blend(self, out: Array, a: Array, a_factor: float, b: Array, b_factor: float) -> None:
        self._kernel.blend(out, a, a_factor, b, b_factor)
        self._charge((a.nbytes + b.nbytes) / self._network.reduce_rate)
