"""All ranks begin with the root's weights and optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horo_lite.keras.backend import bridge
from horo_lite.keras.broadcasting import broadcast_variables, optimizer_variables
from horo_lite.keras.callbacks.callback import Callback
from horo_lite.process_sets import ProcessSet, global_process_set


class BroadcastGlobalVariablesCallback(Callback):
    """Give every rank the root's weights and optimizer variables before the first step.

    Horovod broadcasts after the first batch, since only then all variables exist; so is it here where the model is not
    built before. States of random generators stay each rank's own: dropout must not be the same on all ranks.

    Args:
        root_rank: the global rank that sends.
        device: accepted for Horovod's sake.
        local_variables: variables that stay each rank's own.
        process_set: the ranks that take part.
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Sequence[Any] | None = None,
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local = {id(bridge().native(variable)) for variable in local_variables or ()}
        self._process_set = process_set
        self.broadcast_done = False

    def register_local_var(self, var: Any) -> None:
        """This variable stays each rank's own."""
        self._local.add(id(bridge().native(var)))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        model, optimizer = self.model, self.model.optimizer
        if self.broadcast_done or not model.built or _is_legacy(optimizer):
            return
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = self.model.optimizer
        variables = [*self.model.weights, *optimizer_variables(optimizer)]
        shared = [variable for variable in variables if id(bridge().native(variable)) not in self._local]
        broadcast_variables(shared, self.root_rank, self._process_set)
        self.broadcast_done = True


def _is_legacy(optimizer: Any) -> bool:
    """One of legacy Keras, of which not all can be built before the first batch."""
    return callable(getattr(optimizer, "variables", None))
