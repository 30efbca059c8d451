"""1-bit Adam: Adam whose momentum travels in one bit per element once its variance has settled.

Tang et al. 2021 (arXiv 2102.02888). Compressing gradients breaks Adam, whose variance is not linear in
them. Its variance changes little after a while, though; held fixed, Adam is momentum descent with a
step size per element, and a momentum may be compressed with error feedback.

Two things differ from the paper, where one scale stands for all elements of a momentum:

- What travels is the momentum over the root of the variance, which is linear in it too. Elements are then alike in
  size, and one bit loses less of them. As it is, an element of small variance would be moved by its neighbours' size
  over its own root: the smaller its gradients, the farther.
- An element that had no gradient during the warm-up gets the mean variance of its parameter's others, where the
  paper's authors let users mask it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from horo_lite.arrays import to_torch
from horo_lite.compression import Compression, resolve
from horo_lite.errors import ArgumentError
from horo_lite.process_sets import ProcessSet, global_process_set
from horo_lite.torch.compressor_states import ParameterState
from horo_lite.torch.device_buckets import make_buckets
from horo_lite.torch.loss_scaling import overflowed, unscaled
from horo_lite.torch.names import Naming
from horo_lite.torch.slots import Slot


class OneBitAdam(torch.optim.Optimizer):
    """Adam for slow networks. Making it is collective; it exchanges by itself, so do not wrap it.

    For ``warmup_steps`` it is ``torch.optim.Adam`` with averaged gradients. After that the variance
    stays as it is, each rank adds its own gradient to the common momentum, and what is averaged is
    that momentum, compressed.

    Gradients stay each rank's own, so clipping sees different values on different ranks. Everything is
    exchanged in ``step()``. With a ``GradScaler`` all ranks skip a step that overflowed on any; only
    where it did does the scale go down, so ranks may have different scales, which does no harm.

    Args:
        params: as of any optimizer.
        lr: the learning rate.
        betas: decay of momentum and variance.
        eps: added to the root of the variance.
        weight_decay: times the parameter, added to the gradient.
        warmup_steps: uncompressed steps; the paper takes 15 to 20 % of all.
        named_parameters: ``model.named_parameters()``.
        compression: of the momentum.
        process_set: the ranks that take part.

    Raises:
        DisagreementError: ranks have different parameters; on every rank, with the first difference.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int = 1000,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        compression: Any = Compression.onebit,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if warmup_steps < 1:
            raise ArgumentError(
                f"warmup_steps is {warmup_steps}; expected 1 or more: without a variance there is no step size"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._warmup_steps = warmup_steps
        self._compression = resolve(compression, to_torch)
        self._process_set = process_set
        self._named = Naming(named_parameters, self).names(self)
        self._exchange: _Exchange | None = None

    _step_supports_amp_scaling = True  # see loss_scaling

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange, and update the parameters.

        Args:
            closure: computes the loss and its gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if overflowed(self, self._process_set):
            return loss
        settled = self._steps_done() >= self._warmup_steps
        if self._exchange is None or self._exchange.settled != settled:
            self._exchange = self._make_exchange(settled)
        slots = iter(self._exchange.slots)
        for group in self.param_groups:
            for p in group["params"]:
                next(slots).put(self._outgoing(p, group, settled))
        used = iter(zip(self._exchange.slots, self._exchange.states, self._exchange.finish(), strict=True))
        for group in self.param_groups:
            for p in group["params"]:
                slot, kept, was_used = next(used)
                if was_used and self._update(p, group, slot.value(), settled):
                    _forget(kept)
        self._exchange.settle()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimizer, on all ranks alike."""
        super().add_param_group(param_group)
        if "_named" not in self.__dict__:
            return  # called by the constructor
        known = {id(p): name for name, p in self._named}
        self._named = [(known.get(id(p), name), p) for name, p in Naming(None, self).names(self)]
        if self._exchange is not None:
            self._exchange.buckets.close()
            self._exchange = None

    def __getstate__(self) -> dict[str, Any]:
        own = ("_warmup_steps", "_compression", "_process_set", "_named")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}, "_exchange": None}

    def _steps_done(self) -> int:
        return max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)

    def _make_exchange(self, settled: bool) -> _Exchange:
        if self._exchange is not None:
            self._exchange.buckets.close()
        if settled:
            self._settle_variances()
        return _Exchange(self, self._named, self._compression if settled else None, settled, self._process_set)

    def _settle_variances(self) -> None:
        """Make every variance one to divide by: under one bit per element, every element moves at every step."""
        for state in self.state.values():
            if "exp_avg_sq" in state:
                if state["exp_avg_sq"].any():
                    _fill(state["exp_avg_sq"])
                else:
                    state["variance_steps"] = 0  # as if it had not been used

    def _outgoing(self, p: torch.Tensor, group: dict[str, Any], settled: bool) -> torch.Tensor:
        """What this rank contributes: its gradient; later the momentum with its gradient in it, in Adam's own units."""
        grad = torch.zeros_like(p) if p.grad is None else unscaled(self, p.grad)
        if group["weight_decay"]:
            grad = grad.add(p, alpha=group["weight_decay"])
        if not settled:
            return grad
        state, gain = self.state[p], 1 - group["betas"][0]
        if not _variance_steps(state):
            return grad * gain
        return state["exp_avg"].lerp(grad, gain).div_(_root(state, group))

    def _update(self, p: torch.Tensor, group: dict[str, Any], mean: torch.Tensor, settled: bool) -> bool:
        """Adam's step from the mean of what the ranks contributed.

        Returns:
            whether the parameter's contributions have another unit from the next step on.
        """
        state, (first, second) = self.state[p], group["betas"]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            state["variance_steps"] = 0
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["step"] += 1
        momentum, variance, steps = state["exp_avg"], state["exp_avg_sq"], _variance_steps(state)
        late = settled and not steps and bool(mean.any())  # the first gradient of all came after the warm-up
        if settled and not (steps or late):
            return False
        if not settled or late:
            grad = mean / (1 - first) if settled else mean
            variance.mul_(second).addcmul_(grad, grad, value=1 - second)
            state["variance_steps"] = steps + 1
        if late:
            _fill(variance)
        root = _root(state, group)
        if not settled:
            momentum.lerp_(mean, 1 - first)
        elif late:
            momentum.copy_(mean)
        else:
            torch.mul(mean, root, out=momentum)
        p.addcdiv_(momentum, root, value=-group["lr"] / (1 - first ** int(state["step"])))
        return late


def _forget(kept: ParameterState) -> None:
    """Drop what compression left unsent in a unit that is no longer used."""
    for key in {"residual", "server_residual", "velocity"} & set(kept):
        del kept[key]


def _variance_steps(state: dict[str, Any]) -> int:
    """How many gradients the variance has seen; in a state that plain Adam saved, one a step."""
    return int(state.get("variance_steps", state.get("step", 0)))


def _root(state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
    """What Adam divides a momentum by."""
    correction = 1 - group["betas"][1] ** _variance_steps(state)
    return (state["exp_avg_sq"] / correction).sqrt_().add_(group["eps"])


def _fill(variance: torch.Tensor) -> None:
    """Give the elements without a variance (in place) the mean of their parameter's others."""
    seen = variance > 0
    variance.masked_fill_(~seen, float(variance.sum() / seen.sum().clamp(min=1)))


class _Exchange:
    """One phase's way over the wire.

    Attributes:
        slots: where each parameter's contribution goes, and its mean comes back.
        states: what the compressor keeps for each parameter.
        settled: this is the phase of compressed momenta.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: list[tuple[str, torch.Tensor]],
        compression: Any,
        settled: bool,
        process_set: ProcessSet,
    ) -> None:
        self.settled = settled
        self.states = [ParameterState(optimizer, p) for _, p in named]
        self.buckets = make_buckets(
            named, self.states, groups=None, label="OneBitAdam", process_set=process_set, compression=compression,
            overlap=False,
        )
        self.slots = [Slot(name, p) for name, p in named]
        for number, slot in enumerate(self.slots):
            slot.bind(number, self.buckets.views[number])

    def finish(self) -> list[bool]:
        """Average what was put into the slots. Returns which parameters some rank had a gradient or momentum for."""
        for slot in self.slots:
            if slot.parameter.grad is not None or self.settled:
                self.buckets.ready(slot.number)
        return self.buckets.finish()

    def settle(self) -> None:
        """Move what the compressor keeps into the optimizer's state."""
        for state in self.states:
            state.settle()
