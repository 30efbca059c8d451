"""Models, optimizers and samplers as elastic state."""

from __future__ import annotations

import copy
from typing import Any

import torch

from horo_lite.context import rank
from horo_lite.elastic import ObjectState
from horo_lite.functions import allgather_object, broadcast_object
from horo_lite.torch.elastic.sampler import ElasticSampler
from horo_lite.torch.functions import broadcast_optimizer_state, broadcast_parameters


class StateHandler:
    """How one kind of object is saved, restored and synchronised.

    Args:
        value: the object.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Keep a copy of its state in memory."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Go back to the copy."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Give rank 0's state to all ranks."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Another object takes the place."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """A ``torch.nn.Module``."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateHandler):
    """A ``torch.optim.Optimizer``."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler):
    """An ``ElasticSampler``: what any rank has processed is processed."""

    def sync(self) -> None:
        processed = set().union(*allgather_object(self.value.processed_indices))
        state = broadcast_object({**self.value.state_dict(), "processed_indices": processed})
        self.value.load_state_dict(state)
        self.save()


_registry: list[tuple[type, type[StateHandler]]] = [
    (ElasticSampler, SamplerStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.nn.Module, ModelStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """The kinds of objects that ``TorchState`` knows, and their handlers."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the kinds of objects that ``TorchState`` knows."""
    global _registry
    _registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    return None


class TorchState(ObjectState):
    """Everything that training goes back to: models, optimizers, samplers, and plain objects by name.

    Args:
        model: optional; ``state.model``.
        optimizer: optional; ``state.optimizer``.
        kwargs: anything more, as ``epoch=0, batch=0, sampler=sampler``.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        kwargs.update({name: v for name, v in (("model", model), ("optimizer", optimizer)) if v is not None})
        self._handlers: dict[str, StateHandler] = {}
        plain = {}
        for name, value in kwargs.items():
            handler = _handler_of(value)
            if handler is None:
                plain[name] = value
            else:
                self._handlers[name] = handler
                object.__setattr__(self, name, value)
        super().__init__(broadcast_object, rank, **plain)

    def __setattr__(self, name: str, value: Any) -> None:
        handlers: dict[str, StateHandler] = vars(self).get("_handlers", {})
        if name in handlers:
            handlers[name].set_value(value)
        object.__setattr__(self, name, value)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()
