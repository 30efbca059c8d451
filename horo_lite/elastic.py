"""Elastic training's names, framework-free: state that can be saved, restored and made equal on all ranks.

One world of fixed size: an operation that failed on all ranks (``HorovodInternalError``) takes the state back to its
last commit and goes on with a fresh engine. Ranks neither leave nor join; a lost rank ends the job.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from horo_lite import context
from horo_lite.errors import HorovodInternalError, HostsUpdatedInterrupt, PeerLostError

_log = logging.getLogger("horo_lite")
_FAILED = ("HorovodInternalError", "DisagreementError", "PeerLostError", "ShutDownError")
_ATTEMPTS = 3  # without a commit in between, until an error is taken to be permanent


class State:
    """What training goes back to after a failure.

    Args:
        bcast_object: gives rank 0's object to all ranks.
        get_rank: this process's rank.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = 0

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Call these after a reset, to rescale a learning rate and the like."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The engine has been started anew."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """The set of hosts changed; it never does in one world."""

    def commit(self) -> None:
        """Save the state in memory: what training goes back to."""
        self._commits += 1
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt where the set of hosts has changed; it never does in one world."""

    def save(self) -> None:
        """Save the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give rank 0's state to all ranks, and save it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a new world."""


class ObjectState(State):
    """State of plain Python objects, which become attributes: ``ObjectState(..., epoch=0)`` has ``.epoch``."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        vars(self).update(copy.deepcopy(kwargs))

    def save(self) -> None:
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        vars(self).update(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        if self._saved_state:
            current = {name: getattr(self, name) for name in self._saved_state}
            self._saved_state = self._bcast_object(current)
            self.restore()


class VariableState(ObjectState):
    """State of a framework's variables, which have ``assign``, and of plain Python objects."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        self._values: list[Any] = []
        super().__init__(bcast_object, get_rank, **kwargs)
        self._save_variables()

    def _current_variables(self) -> list[Any]:
        """The variables, which may have become more."""
        raise NotImplementedError

    def _value(self, variable: Any) -> Any:
        """A copy of a variable's values."""
        raise NotImplementedError

    def _broadcast(self, variables: list[Any]) -> None:
        """Give every rank the values of rank 0's."""
        raise NotImplementedError

    def _save_variables(self) -> None:
        self._values = [self._value(variable) for variable in self._current_variables()]

    def save(self) -> None:
        self._save_variables()
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self._current_variables(), self._values, strict=False):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        self._broadcast(self._current_variables())
        self._save_variables()
        super().sync()


def variables_of(model: Any, optimizer: Any) -> list[Any]:
    """A Keras model's variables and its optimizer's, which is built for them if it is not yet."""
    if optimizer is None:
        return list(model.weights)
    if callable(optimizer.variables):  # of legacy Keras
        build = getattr(optimizer, "build", None) or optimizer._create_all_weights
        build(model.trainable_variables)
        return [*model.weights, *optimizer.variables()]
    if not optimizer.built and model.built:
        optimizer.build(model.trainable_variables)
    return [*model.weights, *optimizer.variables]


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """``func(state, ...)`` made to go on from the last commit after a failure; ``reset`` starts a fresh engine."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        failures, commits, skip_sync = 0, state._commits, False
        while True:
            if not skip_sync:
                state.sync()
            try:
                return func(state, *args, **kwargs)
            except PeerLostError:
                raise  # a world of fixed size cannot do without it
            except HorovodInternalError as error:
                failures = 1 if state._commits > commits else failures + 1
                commits = state._commits
                if failures >= _ATTEMPTS:
                    raise
                _log.warning("going back to the last commit: %s", error)
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as update:
                skip_sync = update.skip_sync
            reset()
            state.on_reset()

    return wrapper


def reset_world() -> None:
    """Stop and start the engine, with the same ranks."""
    context.shutdown()
    context.init()


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of ``train(state, ...)``: initialises, and goes on from the last commit after a failure."""
    return run_fn(func, reset_world)


def run_graphs(func: Callable[..., Any], graph_errors: tuple[type[Exception], ...]) -> Callable[..., Any]:
    """``run`` where a failed operation may be within a graph.

    Args:
        graph_errors: as what the framework raises the errors of ours there; it keeps their text alone.
    """

    @functools.wraps(func)
    def train(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(state, *args, **kwargs)
        except graph_errors as error:
            if any(name in str(error) for name in _FAILED):
                raise HorovodInternalError(str(error)) from error
            raise

    return run(train)
