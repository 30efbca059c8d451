"""From what a user passes as ``compression=`` to a ``Compressor``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

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


def resolve(compression: Any, to_tensor: Callable[[Array], Any] = np.asarray) -> Compressor | None:
    """As ``as_compressor``, but None for ``Compression.none``: the gradients need no compressor at all."""
    compressor = as_compressor(compression, to_tensor)
    return None if isinstance(compressor, NoCompression) else compressor


def as_compressor(compression: Any, to_tensor: Callable[[Array], Any] = np.asarray) -> Compressor:
    """The compressor that a user means, with error feedback where the method comes with it.

    Args:
        compression: ``Compression.<name>``, called or not; a compressor (wrapped or of one's own making); a class
            with Horovod's static ``compress`` and ``decompress``.
        to_tensor: makes the framework's tensor of a numpy array, for a class written for Horovod.

    Raises:
        ArgumentTypeError: anything else; shows the right call.
    """
    if isinstance(compression, type) and issubclass(compression, Method):
        compression = compression()
    if isinstance(compression, Method):
        wanted = getattr(compression, "feedback", False) and not compression.own_feedback
        return WithFeedback(compression.contraction()) if wanted else compression
    if not isinstance(compression, type) and callable(getattr(compression, "reduce", None)):
        return compression if callable(getattr(compression, "bind", None)) else Foreign(compression)
    if _is_horovod_style(compression):
        return HorovodStyle(compression, to_tensor)
    raise ArgumentTypeError(
        f"compression is {compression!r}; expected Compression.fp16, Compression.topk(0.01) or another of "
        "hvd.Compression, or a class with static compress(tensor) and decompress(tensor, ctx): "
        "DistributedOptimizer(optimizer, compression=hvd.Compression.fp16)"
    )


def keeps_state(compressor: Compressor) -> bool:
    """True where a compressor needs the states of its last call."""
    return bool(getattr(compressor, "keeps_state", False))


def with_feedback(compression: Any) -> WithFeedback:
    """Error feedback around a method that comes without it, ``with_feedback(Compression.int8)``."""
    inner = as_compressor(compression)
    if isinstance(inner, WithFeedback):
        return inner
    return WithFeedback(inner.contraction() if isinstance(inner, Method) else inner)


def _is_horovod_style(value: Any) -> bool:
    return callable(getattr(value, "compress", None)) and callable(
        getattr(value, "decompress", None)
    )
