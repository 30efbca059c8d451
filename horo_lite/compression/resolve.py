"""From what a user passes as ``compression=`` to a ``Compressor``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from horo_lite.compression.base import Method, label
from horo_lite.compression.casts import NoCompression
from horo_lite.compression.feedback import WithFeedback
from horo_lite.compression.horovod import HorovodStyle
from horo_lite.errors import ArgumentTypeError
from horo_lite.interfaces import Array, Compressor, Group, Parameter


@dataclasses.dataclass(frozen=True, repr=False)
class Foreign:
    """A user's object that has ``reduce`` and no ``bind``."""

    user: Any

    def __repr__(self) -> str:
        return label(self.user)

    @property
    def keeps_state(self) -> bool:
        return bool(getattr(self.user, "keeps_state", False))

    def bind(self, parameters: Sequence[Parameter]) -> Foreign:
        return self

    def reduce(self, gradients: Any, states: Any, group: Group) -> Any:
        return self.user.reduce(gradients, states, group)


def is_compression(value: Any) -> bool:
    """True for what ``as_compressor`` accepts, so that one passed in another argument's place is recognised."""
    return callable(getattr(value, "reduce", None)) or _is_horovod_style(value)


def resolve(
    compression: Any, to_tensor: Callable[[Array], Any] | None = None
) -> Compressor | None:
    """As ``as_compressor``, but None for ``Compression.none``: the gradients need no compressor at all.

    Args:
        compression: what a user passes.
        to_tensor: makes the framework's tensor of a numpy array, for classes written for Horovod, also within wrappers.
    """
    compressor = as_compressor(compression)
    if to_tensor is not None:
        compressor = _on_tensors(compressor, to_tensor)
    return None if isinstance(compressor, NoCompression) else compressor


def as_compressor(compression: Any) -> Compressor:
    """The compressor that a user means, with error feedback where the method comes with it.

    Args:
        compression: ``Compression.<name>``, called or not; a compressor (wrapped or of one's own making) or its class;
            a class with Horovod's static ``compress`` and ``decompress``.

    Raises:
        ArgumentTypeError: anything else; shows the right call.
    """
    if isinstance(compression, type) and callable(getattr(compression, "reduce", None)):
        compression = compression()
    if isinstance(compression, Method):
        wanted = getattr(compression, "feedback", False) and not compression.own_feedback
        return WithFeedback(compression.contraction()) if wanted else compression
    if callable(getattr(compression, "reduce", None)):
        return compression if callable(getattr(compression, "bind", None)) else Foreign(compression)
    if _is_horovod_style(compression):
        return HorovodStyle(compression)
    raise ArgumentTypeError(
        f"compression is {compression!r}; expected Compression.fp16, Compression.topk(0.01) or another of "
        "hvd.Compression, or a class with static compress(tensor) and decompress(tensor, ctx): "
        "DistributedOptimizer(optimizer, compression=hvd.Compression.fp16)"
    )


def keeps_state(compressor: Compressor) -> bool:
    """True where a compressor needs the states of its last call."""
    return bool(getattr(compressor, "keeps_state", False))


def _on_tensors(value: Any, to_tensor: Callable[[Array], Any]) -> Any:
    """The same compressor, in which classes written for Horovod are given the framework's tensors."""
    if isinstance(value, HorovodStyle):
        return value.altered(to_tensor=to_tensor)
    if type(value) in (tuple, list):
        return tuple(_on_tensors(item, to_tensor) for item in value)
    if isinstance(value, Method):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return value.altered(**{name: _on_tensors(item, to_tensor) for name, item in fields.items()})
    return value


def with_feedback(compression: Any) -> Compressor:
    """Error feedback around a method that comes without it, ``with_feedback(Compression.int8)``."""
    inner = as_compressor(compression)
    if isinstance(inner, WithFeedback):
        return inner
    if isinstance(inner, Method) and inner.own_feedback:
        return inner.altered(feedback=True)
    return WithFeedback(inner.contraction() if isinstance(inner, Method) else inner)


def _is_horovod_style(value: Any) -> bool:
    return callable(getattr(value, "compress", None)) and callable(
        getattr(value, "decompress", None)
    )
