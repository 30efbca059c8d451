"""The two places where Keras must know that an optimizer exchanges gradients with other ranks.

Keras has no hook for either, so two of its functions are replaced, when the first optimizer is wrapped, by ones that
do what the originals did for every other optimizer:

- ``model_supports_jit``: XLA cannot call back, so a model with such an optimizer is compiled without it on
  TensorFlow: ``jit_compile="auto"`` resolves to False, and of ``jit_compile=True`` Keras warns that it is False.
- ``LossScaleOptimizer.check_finite``: Keras puts a ``LossScaleOptimizer`` around the optimizer of a mixed_float16
  model. There it looks at gradients before they are reduced, so ranks must agree on whether to skip the step.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
from keras.src.trainers import trainer

from horo_lite.context import is_initialized, rank
from horo_lite.keras.backend import bridge


@functools.cache
def teach_keras() -> None:
    """Replace the two functions, and leave progress bars to rank 0; once.

    Keras hands what it prints to absl's log where interactive logging is off, and that shows warnings only.
    ``keras.config.enable_interactive_logging()`` brings the bars back.
    """
    if is_initialized() and rank() != 0:
        keras.config.disable_interactive_logging()
    if keras.backend.backend() == "tensorflow":
        trainer.model_supports_jit = _aware_of_exchange(trainer.model_supports_jit)
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


def _aware_of_exchange(original: Any) -> Any:
    @functools.wraps(original)
    def model_supports_jit(model: Any) -> bool:
        return exchange_of(getattr(model, "optimizer", None)) is None and bool(original(model))

    return model_supports_jit


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
