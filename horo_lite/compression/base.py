"""What every method is made of: the bucket as one flat array, and the frame that a method fills in.

A method never communicates. It is a generator that yields requests (``interfaces.SumRequest`` and
its mates) and returns ``interfaces.Reduced``; who drives it is none of its business. Methods are
frozen dataclasses: parameters are fields, and whatever changes from step to step lives in the
mappings that the caller keeps (``states``), under these keys:

=================== ======================================================== ==============
key                 value                                                    kept by
=================== ======================================================== ==============
``residual``        what compression left unsent                             feedback
``velocity``        the local momentum                                       dgc, signum
``server_residual`` what encoding the owner's chunk of the mean left unsent   onebit
``server_start``    where in the gradient that chunk starts                  onebit
``warm_start``      the right factor Q of the last step                      powersgd
``draws``           how often random numbers were drawn                      stochastic
``warmup_steps``    steps done so far                                        warmup
``sparsity_steps``  steps done so far                                        dgc
``auto_step``       steps done so far                                        auto
``auto_times``      the best seconds of each candidate                       auto
``auto_choice``     the candidate that was chosen                            auto
=================== ======================================================== ==============
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import zlib
from collections.abc import Callable, Generator, Iterator, MutableMapping, Sequence
from itertools import accumulate
from numbers import Real
from typing import Any, ClassVar, NamedTuple, TypeVar

from horo_lite.arrays import type_name
from horo_lite.compression.backend import Backend, backend_of, is_floating, work_type
from horo_lite.errors import ArgumentError
from horo_lite.interfaces import (
    Array,
    Compressor,
    CompressorRequest,
    Group,
    Parameter,
    Reduced,
    SumRequest,
)

State = MutableMapping[str, Any]
Exchange = Generator[CompressorRequest, Any, Reduced]

_Self = TypeVar("_Self", bound="Method")

RANK_OWN = frozenset({"residual", "velocity", "server_residual", "server_start", "auto_times"})
"""Keys of what every rank has its own of; under the other keys it is the same on all ranks."""

STATE_KEYS = RANK_OWN | {
    "warm_start", "draws", "warmup_steps", "sparsity_steps", "auto_step", "auto_choice",
}  # fmt: skip
"""Every key that a method uses."""


class Layout(NamedTuple):
    """How a flat array is cut into its gradients."""

    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def starts(self) -> list[int]:
        return list(accumulate(self.sizes, initial=0))[:-1]

    def split(self, flat: Array) -> list[Array]:
        """One view per gradient."""
        return [
            flat[start : start + size]
            for start, size in zip(self.starts(), self.sizes, strict=True)
        ]

    def cut(self, start: int, stop: int) -> Layout:
        """The layout of ``flat[start:stop]``: every gradient keeps its place, with the elements that fall inside."""
        return Layout(
            tuple(
                max(0, min(stop, first + size) - max(start, first))
                for first, size in zip(self.starts(), self.sizes, strict=True)
            )
        )


class Bucket:
    """The gradients of one bucket seen as one flat array.

    Attributes:
        own: the gradients one after another in their own type (a view where they lie so in memory); read only.
        layout: how ``own`` is cut into gradients.
        type_name: the gradients' type.
        work_type: the type that methods compute in.
    """

    def __init__(self, gradients: Sequence[Array]) -> None:
        self.backend: Backend = backend_of(gradients[0])
        self.own: Array = self.backend.join(gradients)
        self.layout = Layout(tuple(len(g) for g in gradients))
        self.type_name = type_name(gradients[0])
        self.work_type = work_type(gradients[0])

    @functools.cached_property
    def flat(self) -> Array:
        """``own`` in a type that can be computed in."""
        return self.backend.convert(self.own, self.work_type)

    def replaced(self, flat: Array) -> Bucket:
        """The same bucket with other values, in its work type."""
        other = copy.copy(self)
        other.own = other.flat = flat
        return other

    def reduced(self, mean: Array, contributed: Callable[[], Array]) -> Reduced:
        """The result, from the flat mean and a function that computes this rank's flat contribution if it is asked."""
        split = self.layout.split
        return Reduced(
            split(self.backend.convert(mean, self.type_name)),
            Deferred(lambda: split(contributed())),
        )


class Deferred(Sequence[Array]):
    """A sequence computed when first looked at: decoding one's own payload is wasted unless feedback wants it."""

    def __init__(self, compute: Callable[[], Sequence[Array]]) -> None:
        self._compute = compute

    @functools.cached_property
    def _items(self) -> Sequence[Array]:
        return self._compute()

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Array]:
        return iter(self._items)


@dataclasses.dataclass(frozen=True, repr=False)
class Method:
    """A compression method: a ``Compressor`` whose subclass says what happens to one bucket of floats.

    Args:
        parameters: set by ``bind``: names and shapes of the bucket's parameters, empty where unknown.
    """

    own_feedback: ClassVar[bool] = False
    """True where a method keeps its residual itself, because feedback around it would come in the wrong place."""

    parameters: tuple[Parameter, ...] = dataclasses.field(default=(), kw_only=True, compare=False)

    def __repr__(self) -> str:
        fields = (f for f in dataclasses.fields(self) if f.name != "parameters")
        values = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields)
        return f"{type(self).__name__}({values})"

    def bind(self, parameters: Sequence[Parameter]) -> Compressor:
        return self.altered(parameters=tuple(parameters))

    def altered(self: _Self, **fields: Any) -> _Self:
        """A copy with other fields; also of a subclass whose ``__init__`` takes other arguments."""
        other = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(other, name, value)
        return other

    @property
    def keeps_state(self) -> bool:
        """True where a call without the states of the last one would give a different result in the long run."""
        return False

    def contraction(self: _Self) -> _Self:
        """The variant to put under error feedback, which converges only if encoding shrinks the error."""
        return self

    def reduce(self, gradients: Sequence[Array], states: Sequence[State], group: Group) -> Exchange:
        if not gradients:
            return Reduced([], [])
        bucket = Bucket(gradients)
        if bucket.layout.total == 0 or not is_floating(bucket.own):
            return (yield from plain_mean(bucket, group))
        return (yield from self.exchange(bucket, states, group))

    def exchange(self, bucket: Bucket, states: Sequence[State], group: Group) -> Exchange:
        """Reduce a bucket of at least one floating-point element."""
        raise NotImplementedError

    def salt(self, bucket: Bucket) -> int:
        """Keeps two buckets' random numbers apart, and is the same on all ranks."""
        names = "\n".join(parameter.name for parameter in self.parameters)
        return zlib.crc32(names.encode(), bucket.layout.total & 0xFFFFFFFF)


def plain_mean(bucket: Bucket, group: Group) -> Exchange:
    """The mean without compression: one all-reduce of the bucket in its own type."""
    mean = yield SumRequest(bucket.own, 1.0 / group.size)
    return bucket.reduced(mean, lambda: bucket.own)


def remembered(state: State, key: str, elements: int, backend: Backend, name: str) -> Array | None:
    """A state's array in the type ``name``, or None where there is none or the parameter's size has changed."""
    array = state.get(key)
    if array is None or array.ndim != 1 or len(array) != elements:
        return None
    return backend.convert(array, name)


def next_draw(states: Sequence[State], key: str = "draws") -> int:
    """Counts one more step in every state. The largest count stands where parameters were regrouped."""
    step = max((int(state.get(key, 0)) for state in states), default=0)
    for state in states:
        state[key] = step + 1
    return step


class Frozen(MutableMapping[str, Any]):
    """A joined rank's view of a state: it contributes zeros, so arrays stay hidden and unchanged; counters go on.

    The counters are what ranks must agree on (which elements a shared seed selects, whether warm-up is over).
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def __getitem__(self, key: str) -> Any:
        value = self._state[key]
        if hasattr(value, "dtype"):
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        if not hasattr(value, "dtype"):
            self._state[key] = value

    def __delitem__(self, key: str) -> None:
        del self._state[key]

    def __iter__(self) -> Iterator[str]:
        return (key for key, value in self._state.items() if not hasattr(value, "dtype"))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def label(user: Any) -> str:
    """What messages call a user's class or object; the same on every rank, so without an address."""
    if isinstance(user, type):
        return user.__qualname__
    text = repr(user)
    return f"{type(user).__qualname__}()" if " at 0x" in text else text


def check_between(name: str, value: float, low: float, high: float, example: str) -> None:
    """Accept a value in (low, high].

    Raises:
        ArgumentError: it is not; says what was expected and shows a right call.
    """
    if not (isinstance(value, (int, float)) and low < value <= high):
        raise ArgumentError(
            f"{name} is {value!r}; expected a number above {low:g} and at most {high:g}, as in {example}"
        )


def check_count(name: str, value: float, example: str) -> None:
    """Accept a whole number, 0 or more.

    Raises:
        ArgumentError: it is not; says what was expected and shows a right call.
    """
    if not (isinstance(value, Real) and value >= 0 and value % 1 == 0):
        raise ArgumentError(f"{name} is {value!r}; expected a whole number, 0 or more, as in {example}")
