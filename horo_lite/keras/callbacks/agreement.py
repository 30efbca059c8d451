"""Callbacks by which ranks stop together, and notice when they drift apart."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import numpy as np

from horo_lite import functions
from horo_lite.errors import DisagreementError
from horo_lite.keras.backend import bridge
from horo_lite.keras.broadcasting import broadcast_variables, optimizer_variables
from horo_lite.keras.callbacks.callback import Callback
from horo_lite.process_sets import ProcessSet, global_process_set

_log = logging.getLogger("horo_lite")


class EarlyStoppingAgreementCallback(Callback):
    """All ranks stop in the epoch in which one of them wants to.

    ``EarlyStopping`` on a metric that differs between ranks, ``TerminateOnNaN`` on one rank or a custom callback that
    sets ``model.stop_training`` would leave the others waiting. Put this callback last.

    Args:
        everyone: stop when all ranks want to, not when the first does.
        process_set: the ranks that take part.
    """

    def __init__(self, *, everyone: bool = False, process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self._op = functions.Min if everyone else functions.Max
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._process_set.included():
            return
        own = np.array([bool(self.model.stop_training)], np.uint8)
        agreed = functions.allreduce(own, op=self._op, name="stop_training", process_set=self._process_set)
        if bool(agreed[0]) and not own[0]:
            _log.info("another rank stops training after epoch %d, so this one does too", epoch + 1)
        self.model.stop_training = bool(agreed[0])


class JoinCallback(Callback):
    """Ranks may have different numbers of batches: those that have fewer wait at the end of the epoch for the others.

    A rank that waits contributes zeros to the others' gradients (their average still divides by all ranks), and then
    gets the weights and the optimizer's state of the rank that went on longest. Put this callback first: what others
    exchange at the end of an epoch must come after it.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        bridge().settle()
        longest = functions.join()
        broadcast_variables([*self.model.weights, *optimizer_variables(self.model.optimizer)], longest)


class ConsistencyCallback(Callback):
    """Compare the weights of all ranks every so many batches.

    They should be the same bits. They drift apart where a rank changes weights by itself, gets other initial weights
    or skips the exchange.

    Args:
        every_n_batches: how often; a check costs one pass over the weights and a message of some bytes.
        optimizer_too: compare the optimizer's variables as well.
        process_set: the ranks that take part.

    Raises:
        DisagreementError: from ``fit``, on every rank; names the first variable that differs, and the ranks.
    """

    def __init__(
        self,
        every_n_batches: int = 100,
        *,
        optimizer_too: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__()
        self._every = every_n_batches
        self._optimizer_too = optimizer_too
        self._process_set = process_set
        self._seen = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._seen += 1
        if self._seen % self._every == 0:
            variables = list(self.model.weights)
            if self._optimizer_too:
                variables += optimizer_variables(self.model.optimizer)
            check_consistency(variables, self._process_set)


def check_consistency(variables: list[Any], process_set: ProcessSet = global_process_set) -> None:
    """Compare variables over ranks, bit by bit (by a 128-bit digest of each).

    Raises:
        DisagreementError: they differ; on every rank, with the first that does.
    """
    if not process_set.included():
        return
    own = [
        (
            str(getattr(variable, "path", variable.name)),
            hashlib.blake2b(np.asarray(bridge().to_array(variable), order="C").tobytes(), digest_size=16).digest(),
        )
        for variable in variables
    ]
    everyone = functions.allgather_object([digest for _, digest in own], "check_consistency", process_set)
    for place, (name, _) in enumerate(own):
        found = [digests[place] if place < len(digests) else b"" for digests in everyone]
        if any(digest != found[0] for digest in found):
            ranks = process_set.ranks or list(range(len(found)))
            others = [str(rank) for rank, digest in zip(ranks, found, strict=False) if digest != found[0]]
            raise DisagreementError(
                f"variable {name!r} differs between ranks: rank {ranks[0]} has other bits than rank "
                f"{', '.join(others)}. Broadcast the variables at the start (BroadcastGlobalVariablesCallback), and "
                "change none on one rank only"
            )
