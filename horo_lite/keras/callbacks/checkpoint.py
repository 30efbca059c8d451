"""A checkpoint of the best model so far, written once."""

from __future__ import annotations

from typing import Any

import keras

from horo_lite.context import is_initialized, rank
from horo_lite.errors import ArgumentError
from horo_lite.keras.callbacks.callback import ForLegacyKeras


class BestModelCheckpoint(ForLegacyKeras, keras.callbacks.ModelCheckpoint):
    """``keras.callbacks.ModelCheckpoint(save_best_only=True)`` that writes on rank 0 only.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: as in Keras.
        filepath: where to; may be set later, as the attribute of this name.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        *,
        filepath: str = "",
    ) -> None:
        ending = "best.weights.h5" if save_weights_only else "best.keras"  # Keras checks the ending at once
        super().__init__(
            filepath=filepath or ending, monitor=monitor, verbose=verbose, save_best_only=True,
            save_weights_only=save_weights_only, mode=mode, save_freq=save_freq,
        )
        self.filepath = filepath

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not self.filepath:
            raise ArgumentError("BestModelCheckpoint: set its filepath before fit(), for example to 'best.keras'")
        super().on_train_begin(logs)

    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        if not is_initialized() or rank() == 0:
            super()._save_model(*args, **kwargs)
