"""The places where Keras must know that an optimizer exchanges gradients with other ranks.

Keras has no hook for them, so when the first optimizer is wrapped some of its methods are replaced by ones that do
what the originals did for every other optimizer:

- ``Trainer.jit_compile``, on TensorFlow: XLA cannot call back, so a model with such an optimizer is compiled without
  it. ``jit_compile="auto"`` resolves to False on every device; of ``jit_compile=True`` rank 0 says what becomes of it.
- ``Trainer.compile`` takes ``experimental_run_tf_function``, which scripts for Horovod have passed since TensorFlow
  2.0 so that their optimizer's methods are called; Keras 3 always calls them and knows no such argument.
- ``LossScaleOptimizer.check_finite``: Keras puts a ``LossScaleOptimizer`` around the optimizer of a mixed_float16
  model. There it looks at gradients before they are reduced, so ranks must agree on whether to skip the step.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import keras
from keras.src.trainers.trainer import Trainer

from horo_lite.context import is_initialized, rank
from horo_lite.keras.backend import bridge

_log = logging.getLogger("horo_lite")
_TOLD = "_horo_lite_told_of_xla"


@functools.cache
def teach_keras() -> None:
    """Replace these methods, and leave progress bars to rank 0; once.

    Keras hands what it prints to absl's log where interactive logging is off, and that shows warnings only.
    ``keras.config.enable_interactive_logging()`` brings the bars back.
    """
    if is_initialized() and rank() != 0:
        keras.config.disable_interactive_logging()
    if keras.backend.backend() == "tensorflow":
        Trainer.jit_compile = property(_unless_exchanging(Trainer.jit_compile.fget), Trainer.jit_compile.fset)
        Trainer._resolve_auto_jit_compile = _false_where_exchanging(Trainer._resolve_auto_jit_compile)
    Trainer.compile = _taking_old_arguments(Trainer.compile)
    scaled = keras.optimizers.LossScaleOptimizer
    scaled.check_finite = _agreed(scaled.check_finite)


def exchange_of(optimizer: Any) -> Any:
    """The exchange of a wrapped optimizer, also of one inside loss scaling; None of any other."""
    while optimizer is not None:
        exchange = getattr(optimizer, "horo_lite", None)
        if exchange is not None:
            return exchange
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return None


def _exchanges(model: Any) -> bool:
    return exchange_of(getattr(model, "optimizer", None)) is not None


def _unless_exchanging(original: Any) -> Any:
    @functools.wraps(original)
    def jit_compile(model: Any) -> Any:
        wanted = original(model)
        if not wanted or not _exchanges(model):
            return wanted
        model._jit_compile = False
        if _TOLD not in vars(model) and (not is_initialized() or rank() == 0):
            vars(model)[_TOLD] = True
            _log.warning(
                "model %r is trained without XLA: jit_compile=True was asked for, but a function that XLA has compiled "
                "cannot exchange gradients with other ranks. Pass jit_compile=False to compile(); to have XLA compute "
                "layers all the same, put @tf.function(jit_compile=True) on their call()",
                model.name,
            )
        return False

    return jit_compile


def _false_where_exchanging(original: Any) -> Any:
    @functools.wraps(original)
    def resolve_auto_jit_compile(model: Any) -> bool:
        return not _exchanges(model) and bool(original(model))

    return resolve_auto_jit_compile


def _taking_old_arguments(original: Any) -> Any:
    @functools.wraps(original)
    def compile(model: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("experimental_run_tf_function", None)
        original(model, *args, **kwargs)
        _ = model.jit_compile  # now, and not in the first step, is the time to say that there will be no XLA

    return compile


def _agreed(original: Any) -> Any:
    @functools.wraps(original)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        if getattr(self, "horo_lite", None) is not None:
            return finite  # gradients were reduced before
        exchange = exchange_of(self.inner_optimizer)
        if exchange is None or not exchange.settings.options.takes_part:
            return finite
        options = exchange.settings.options
        return bridge().all_true(finite, options, f"{options.label}.finite")

    return check_finite
