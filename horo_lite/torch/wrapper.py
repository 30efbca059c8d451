"""The wrapped optimizer: the user's own object, whose class has become a subclass that exchanges before it steps.

So whatever holds the optimizer already (a scheduler, a GradScaler, a framework) goes on working, ``isinstance`` and
``state_dict`` are those of the wrapped class, and pickling or copying gives a plain optimizer of that class, which
can be wrapped again.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from horo_lite.functions import Average, allreduce
from horo_lite.torch.adasum import AdasumExchange
from horo_lite.torch.gradients import GradientExchange
from horo_lite.torch.loss_scaling import overflowed, unscale
from horo_lite.torch.settings import Settings

_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
    "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you "
    "use optimizer.synchronize() in your code."
)


class Distributed:
    """What is put in front of the wrapped class; see ``DistributedOptimizer``."""

    wrapped_class: Any
    _exchange: GradientExchange | AdasumExchange | None
    _settings: Settings
    _synchronized: bool
    _should_synchronize: bool

    def step(self: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Exchange what has not been exchanged, then update the parameters as the wrapped class does.

        Args:
            closure: computes the loss and its gradients; both are exchanged each time it is called.
        """
        self._opt_called = True  # read by learning rate schedulers
        if self._exchange is None:
            return self._wrapped_step(closure, *args, **kwargs)
        if closure is None:
            if self._should_synchronize:
                if self._synchronized:
                    warnings.warn(_TWICE, stacklevel=2)
                self._exchange.complete()
            if self._steps_from_own_gradients and not self._unscale():
                return None
            self._clip()
            loss = self._exchange.step(functools.partial(self._wrapped_step, *args, **kwargs))
        else:
            evaluate = functools.partial(self._evaluate, closure)
            loss = self._exchange.step(functools.partial(self._wrapped_step, evaluate, *args, **kwargs))
        self._synchronized = False
        return loss

    # torch wraps a class's step() to run its hooks, and schedulers wrap an object's to see it called: the wrapped
    # class's step, called from here, does the one, and _opt_called above the other.
    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @property
    def _step_supports_amp_scaling(self: Any) -> bool:
        """A ``GradScaler`` reads this before it looks for infinities: then all ranks must have the same gradients."""
        if self._steps_from_own_gradients:
            return True
        if self._exchange is not None and self._should_synchronize:
            self._exchange.complete()
        return self._scales_itself

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self: Any, value: bool) -> None:
        vars(self)["_step_supports_amp_scaling"] = value

    @property
    def _scales_itself(self: Any) -> bool:
        """The wrapped class supports it, as fused optimizers do."""
        default = getattr(self.wrapped_class, "_step_supports_amp_scaling", False)
        return bool(vars(self).get("_step_supports_amp_scaling", default))

    @property
    def _steps_from_own_gradients(self: Any) -> bool:
        return isinstance(self._exchange, AdasumExchange)

    def _unscale(self: Any) -> bool:
        """For a ``GradScaler``, if one calls ``step()``. False when it found an infinity on some rank."""
        if overflowed(self, self._settings.process_set):
            return False
        if not self._scales_itself:
            unscale(self)
        return True

    def _wrapped_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is None:
            args = args[1:]
        return super().step(*args, **kwargs)  # type: ignore[misc]

    def _evaluate(self: Any, closure: Callable[[], Any]) -> Any:
        """The user's closure, with what it computed made equal on all ranks where the optimizer branches on it."""
        self._exchange.begin_step()
        loss = closure()
        self._exchange.complete()
        self._clip()
        if isinstance(self, torch.optim.LBFGS):
            value = torch.as_tensor(loss).detach()
            loss = allreduce(value, op=Average, process_set=self._settings.process_set)
        return loss

    def _clip(self: Any) -> None:
        if self._settings.clip_norm is None:
            return
        scale = getattr(self, "grad_scale", None)  # set by a GradScaler that leaves unscaling to a fused step
        limit = self._settings.clip_norm * (1.0 if scale is None else float(scale))
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], limit)

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Clear the gradients, also those of a window of backward passes that has not ended."""
        if self._exchange is not None:
            self._exchange.forget()
        self._synchronized = False
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def synchronize(self: Any) -> None:
        """Wait until ``.grad`` of every parameter holds its reduced value; then clip it, then ``step()``."""
        if self._exchange is not None:
            self._exchange.complete()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self: Any) -> Iterator[None]:
        """In this context ``step()`` exchanges nothing: ``synchronize()`` was called before."""
        if self._steps_from_own_gradients:
            raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self: Any, passes: int) -> None:
        """Change the number of backward passes per step, from the next one on."""
        if self._exchange is not None:
            self._exchange.window = check_passes(passes)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return object.__new__, (self.wrapped_class,), self.__getstate__()


@functools.cache
def distributed_class(wrapped: Any) -> type:
    """The subclass of ``wrapped`` that exchanges; it has its name, so that messages and profiles show that."""
    names = {
        "wrapped_class": wrapped,
        "__doc__": wrapped.__doc__,
        "__module__": wrapped.__module__,
        "__qualname__": wrapped.__qualname__,
    }
    return type(wrapped.__name__, (Distributed, wrapped), names)


def wrap(optimizer: Any, settings: Settings, make_exchange: Callable[..., Any]) -> Any:
    """Turn an optimizer into a distributed one, in place; one that is distributed already is wrapped anew."""
    if isinstance(optimizer, Distributed):
        if optimizer._exchange is not None:
            optimizer._exchange.close()
        optimizer.__class__ = optimizer.wrapped_class
    # A scheduler made before has put its own wrapper of the old step there.
    vars(optimizer).pop("step", None)
    exchange = make_exchange(optimizer, settings) if settings.process_set.included() else None
    wrapped: Any = type(optimizer)
    optimizer.__class__ = distributed_class(wrapped)
    optimizer._exchange = exchange
    optimizer._settings = settings
    optimizer._synchronized = False
    optimizer._should_synchronize = True
    return optimizer


def check_passes(passes: int) -> int:
    """A number of backward passes per step.

    Raises:
        ValueError: it is not positive.
    """
    if not isinstance(passes, int) or passes <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    return passes
