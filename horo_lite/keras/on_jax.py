"""Keras on jax. See ``backend.Bridge``.

Keras compiles the whole training step by XLA (``jit_compile="auto"``), and jax's XLA, other than TensorFlow's, calls
back: an exchange is one ordered ``io_callback``, which is given the gradients and returns the reduced ones. Here is why
no two ranks can lock one another up: a process carries out its ordered callbacks one after another in the order of its
program, the same on all ranks, and each has submitted all that it waits for.

Tracing makes the buckets, so all ranks must trace the same steps in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental import io_callback

from horo_lite import functions
from horo_lite.arrays import numpy_dtype
from horo_lite.errors import ArgumentError, HorovodInternalError
from horo_lite.exchange import BucketExchange
from horo_lite.exchange_options import ExchangeOptions, ParameterSpec
from horo_lite.functions import Min
from horo_lite.keras.backend import parameters

graph_errors = (jax.errors.JaxRuntimeError,)


def native(variable: Any) -> Any:
    """Keras' own: what is behind it is another array after every step."""
    return variable


def compression(compression: Any) -> Any:
    """A user's own compressor sees numpy's arrays: making jax's could wait for the very thread that calls it."""
    return compression


class JaxReducer:
    """Reduces jax gradients through the buckets, eager and in steps that are being traced.

    Args:
        gradients: the first step's. Ranks tell each other which are missing, since a traced step must return a
            gradient that another rank has.
    """

    def __init__(self, options: ExchangeOptions, variables: Sequence[Any], gradients: Sequence[Any]) -> None:
        if keras.distribution.distribution() is not None:
            raise ArgumentError(
                "keras.distribution spreads a model over the devices of one process, and a rank here drives one "
                "device: leave out keras.distribution.set_distribution(), start as many ranks as there are devices, "
                "and give each its own by jax.config.update('jax_cuda_visible_devices', str(hvd.local_rank()))"
            )
        self._label = options.label
        self._parameters = parameters(variables)
        own = [gradient is not None for gradient in gradients]
        everyone = functions.allgather_object(own, f"{options.label}.given", options.process_set)
        self._expected = {index for known in everyone for index, is_given in enumerate(known) if is_given}
        self._exchange = BucketExchange(options, self._parameters, variables)

    @property
    def context(self) -> Any:
        """See ``backend.Reducer``."""
        return self._exchange.context

    @property
    def states(self) -> dict[str, MutableMapping[str, Any]]:
        """See ``backend.Reducer``."""
        return self._exchange.states

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """See ``backend.Reducer``."""
        given = [index for index, gradient in enumerate(gradients) if gradient is not None]
        returned = sorted(self._expected.union(given))
        tensors = [dense(gradients[index], self._parameters[index][2]) for index in given]

        def exchange(arrays: Sequence[Any]) -> list[Any]:
            own: list[Any] = [None] * len(gradients)
            for index, array in zip(given, arrays, strict=True):
                own[index] = array
            reduced = self._exchange.reduce(own)
            self._check_returned(reduced, returned)
            return [self._shaped(index, reduced[index]) for index in returned]

        results: list[Any] = [None] * len(gradients)
        specs = [self._parameters[index] for index in returned]
        for index, tensor in zip(returned, on_host(exchange, tensors, specs), strict=True):
            results[index] = tensor
        return results

    def _shaped(self, index: int, view: Any) -> Any:
        _, shape, type_name = self._parameters[index]
        return np.zeros(shape, numpy_dtype(type_name)) if view is None else view.reshape(shape)

    def _check_returned(self, reduced: Sequence[Any], returned: Sequence[int]) -> None:
        for index, view in enumerate(reduced):
            if view is not None and index not in returned:
                raise HorovodInternalError(
                    f"{self._label}: another rank has a gradient for {self._parameters[index][0]}, which this rank's "
                    "step was traced without and so cannot apply: give every rank's apply() the same gradients, "
                    "zeros where there is none"
                )


def make_reducer(
    options: ExchangeOptions, variables: Sequence[Any], gradients: Sequence[Any], share: bool
) -> JaxReducer:
    """See ``JaxReducer``."""
    return JaxReducer(options, variables, gradients)


def dense(gradient: Any, type_name: str) -> Any:
    """Keras' gradients are dense on jax."""
    return jax.numpy.asarray(gradient, numpy_dtype(type_name))


def on_host(
    function: Callable[[Sequence[Any]], Sequence[Any]], tensors: Sequence[Any], outputs: Sequence[ParameterSpec]
) -> list[Any]:
    """At once, or as a callback of the step that is being traced."""

    def callback(*arrays: Any) -> list[Any]:
        return list(function([np.asarray(array) for array in arrays]))

    if not any(map(_is_traced, tensors)):
        return [jax.numpy.array(value) for value in callback(*tensors)]  # copies: it may be the bucket's memory
    specs = [jax.ShapeDtypeStruct(shape, numpy_dtype(type_name)) for _, shape, type_name in outputs]
    return list(io_callback(callback, specs, *tensors, ordered=True))


def when(condition: Any, action: Callable[[], None], variables: Sequence[Any]) -> None:
    """A branch of a traced step must not assign, so it returns what all variables come to."""
    if not _is_traced(condition):
        if condition:
            action()
        return
    before = [variable.value for variable in variables]

    def acted() -> list[Any]:
        with keras.StatelessScope(list(zip(variables, before, strict=True))) as scope:
            action()
        return [scope.get_current_value(variable) for variable in variables]

    for variable, value in zip(variables, jax.lax.cond(condition, acted, lambda: before), strict=True):
        variable.assign(value)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Itself: tracing is how jax compiles, and an exchange is a callback."""
    return function


def in_update(optimizer: Any, action: Callable[[], Any], otherwise: Any) -> Any:
    """On jax Keras computes an update in every pass, and drops it in all but the last of a window."""
    is_last = (optimizer._iterations.value + 1) % optimizer.gradient_accumulation_steps == 0
    if _is_traced(is_last):
        return jax.lax.cond(is_last, action, lambda: otherwise)
    return action() if is_last else otherwise


def settle() -> None:
    """jax returns before a step has ended."""
    jax.effects_barrier()


def all_true(flag: Any, options: ExchangeOptions, name: str) -> Any:
    """The minimum over ranks."""

    def agree(flags: Sequence[Any]) -> list[Any]:
        own = flags[0].astype(np.uint8)
        return [functions.allreduce(own, op=Min, name=name, process_set=options.process_set).astype(bool)]

    return on_host(agree, [flag], [(name, (), "bool")])[0]


def to_array(value: Any) -> Any:
    """The values, in host memory."""
    return np.asarray(value.value if isinstance(value, keras.Variable) else value)


def _is_traced(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)
