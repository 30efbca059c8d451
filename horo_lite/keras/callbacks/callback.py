"""What our callbacks are made on."""

from __future__ import annotations

import keras


class ForLegacyKeras:
    """What makes a callback one that legacy Keras (``tf_keras``) calls too: it asks which hooks there are."""

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


class Callback(ForLegacyKeras, keras.callbacks.Callback):
    """A callback of either Keras."""
