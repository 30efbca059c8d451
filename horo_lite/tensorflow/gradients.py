"""Lists of TensorFlow gradients through the buckets: dense ones, ``tf.IndexedSlices`` and None, eager and in graphs.

A gradient is copied once, from TensorFlow's memory into its place in the bucket. In a graph the copies are made by a
few submit nodes, last layers first, as back-propagation delivers them; one wait node follows.
"""

from __future__ import annotations

import itertools
from collections.abc import MutableMapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horo_lite import functions
from horo_lite.errors import HorovodInternalError
from horo_lite.exchange import BucketExchange
from horo_lite.exchange_options import ExchangeOptions, ParameterSpec
from horo_lite.interfaces import Reduction
from horo_lite.tensorflow import bridge
from horo_lite.tensorflow.collectives import grouped_allgather

Gradient = Any
"""A tensor, ``tf.IndexedSlices`` or None."""

_SUBMIT_BYTES = 4 << 20  # a callback costs some 50 us, a copy of 4 MiB some 500
_counts: dict[int, itertools.count[int]] = {}


class GradientReducer:
    """Reduces the gradients of one list of variables, step after step. Making it is collective over the process set.

    Args:
        options: how.
        parameters: name, shape and type of each variable.
        variables: the variables, for the groups.
        first: the first step's gradients. Ranks tell each other which are sparse and which are missing, so that
            all send the same things even where one rank lacks a gradient that another has.
        share: results may be views of the buckets, valid until the next step: the caller consumes them at once.
    """

    def __init__(
        self,
        options: ExchangeOptions,
        parameters: Sequence[ParameterSpec],
        variables: Sequence[Any],
        first: Sequence[Gradient],
        share: bool = False,
    ) -> None:
        self._options = options
        self._parameters = list(parameters)
        self._share = share
        number = next(_counts.setdefault(options.process_set.process_set_id or 0, itertools.count()))
        self._label = f"{options.label}.{number}"
        kinds = functions.allgather_object(
            [_kind(gradient) for gradient in first], f"{self._label}.kinds", options.process_set
        )
        self._sparse, self._expected = self._agree(kinds)
        self._dense = [i for i in range(len(self._parameters)) if i not in self._sparse]
        self._place = {index: place for place, index in enumerate(self._dense)}
        # With nothing dense too: ranks must agree on that as well.
        self._exchange = BucketExchange(
            options, [self._parameters[i] for i in self._dense], [variables[i] for i in self._dense]
        )

    @property
    def context(self) -> Any:
        """The world that the buckets belong to."""
        return self._exchange.context

    @property
    def states(self) -> dict[str, MutableMapping[str, Any]]:
        """By parameter's name, what a compressor keeps from step to step."""
        return self._exchange.states

    def _agree(self, kinds: list[list[str]]) -> tuple[list[int], set[int]]:
        """Which gradients are gathered as rows, and which exist on some rank."""
        sparse, expected = [], set[int]()
        for index in range(len(self._parameters)):
            seen = {own[index] for own in kinds if index < len(own)} - {"none"}
            if seen:
                expected.add(index)
            adasum = self._options.op is Reduction.ADASUM
            if seen == {"sparse"} and not self._options.sparse_as_dense and not adasum:
                sparse.append(index)
        return sparse, expected

    def reduce(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """This step's gradients, reduced. What no rank has stays None."""
        prepared = [
            None if gradient is None else self._as_agreed(index, gradient)
            for index, gradient in enumerate(gradients)
        ]
        return self._reduce_now(prepared) if tf.executing_eagerly() else self._reduce_in_graph(prepared)

    def _as_agreed(self, index: int, gradient: Gradient) -> Gradient:
        """In the variable's type, and dense or sparse as all ranks have it."""
        dtype = tf.as_dtype(self._parameters[index][2])
        if index in self._sparse:
            if not isinstance(gradient, tf.IndexedSlices):
                gradient = tf.IndexedSlices(gradient, tf.range(tf.shape(gradient)[0]))
            values, indices = tf.cast(gradient.values, dtype), tf.cast(gradient.indices, tf.int64)
            return tf.IndexedSlices(values, indices, gradient.dense_shape)
        dense = tf.convert_to_tensor(gradient)
        return dense if dense.dtype == dtype else tf.cast(dense, dtype)

    def close(self) -> None:
        """Give the buckets back."""
        self._exchange.buckets.close()

    # --- eager -------------------------------------------------------------------------------------------------

    def _reduce_now(self, gradients: list[Gradient]) -> list[Gradient]:
        results: list[Gradient] = [None] * len(gradients)
        for index in reversed(self._dense):
            if gradients[index] is not None:
                self._exchange.put(self._place[index], bridge.to_array(gradients[index]))
        self._gather(gradients, results)
        used_somewhere = self._exchange.finish() if self._dense else []
        for index, used in zip(self._dense, used_somewhere, strict=True):
            if used:
                results[index] = bridge.to_tensor(self._result(index))
        return results

    def _result(self, index: int) -> Any:
        view = self._exchange.result(self._place[index]).reshape(self._parameters[index][1])
        return view if self._share else view.copy()

    # --- in a graph --------------------------------------------------------------------------------------------

    def _reduce_in_graph(self, gradients: list[Gradient]) -> list[Gradient]:
        given = [index for index in self._dense if gradients[index] is not None]
        returned = [index for index in self._dense if index in self._expected or index in given]
        results: list[Gradient] = [None] * len(gradients)
        self._gather(gradients, results)
        if not self._dense:
            return results
        after = bridge.marks().get(self, ())  # the same buckets may have served an exchange of this graph before
        label = self._options.label
        tickets = [
            bridge.submit([gradients[i] for i in part], self._starter(part), label, after)
            for part in self._parts(given) or [[]]
        ]
        specs = [tf.TensorSpec(self._parameters[i][1], self._parameters[i][2]) for i in returned]

        def finish(_: Any) -> list[Any]:
            self._check_expected(self._exchange.finish(), returned)
            return [*(self._result(index) for index in returned), np.int64(len(returned))]

        *reduced, done = bridge.wait(tickets, finish, [*specs, tf.TensorSpec((), tf.int64)], label)
        bridge.marks()[self] = [done.op]
        for index, tensor in zip(returned, reduced, strict=True):
            results[index] = tensor
        return results

    def _starter(self, indices: list[int]) -> Any:
        def start(arrays: list[Any]) -> None:
            self._exchange.renew()
            for index, array in zip(indices, arrays, strict=True):
                self._exchange.put(self._place[index], array)

        return start

    def _parts(self, indices: list[int]) -> list[list[int]]:
        """Gradients that go in one submit node each: last first, some megabytes together."""
        parts: list[list[int]] = []
        room = 0
        for index in reversed(indices):
            nbytes = self._exchange.result(self._place[index]).nbytes
            if nbytes > room:
                parts.append([])
                room = _SUBMIT_BYTES
            parts[-1].append(index)
            room -= nbytes
        return parts

    def _check_expected(self, used: list[bool], returned: list[int]) -> None:
        for index, is_used in zip(self._dense, used, strict=True):
            if is_used and index not in returned:
                raise HorovodInternalError(
                    f"{self._options.label}: another rank has a gradient for {self._parameters[index][0]}, which this "
                    "rank's graph was traced without and so cannot apply. Trace the same function on every rank, or "
                    "use tape.gradient(..., unconnected_gradients=tf.UnconnectedGradients.ZERO)"
                )

    # --- sparse ------------------------------------------------------------------------------------------------

    def _gather(self, gradients: list[Gradient], results: list[Gradient]) -> None:
        """Every rank's rows of the sparse gradients; a rank that lacks one sends none."""
        flat: list[Any] = []
        for index in self._sparse:
            slices = gradients[index]
            if slices is None:
                shape, dtype = self._parameters[index][1:]
                slices = tf.IndexedSlices(tf.zeros([0, *shape[1:]], dtype), tf.zeros([0], tf.int64))
            flat += [slices.values, slices.indices]
        if not flat:
            return
        name = f"{self._label}.rows" if tf.executing_eagerly() else bridge.graph_name(f"{self._label}.rows")
        gathered = grouped_allgather(flat, name=name, process_set=self._options.process_set)
        for place, index in enumerate(self._sparse):
            values, indices = gathered[2 * place], gathered[2 * place + 1]
            if self._options.op is Reduction.AVERAGE:
                values = values / tf.cast(self._options.size, values.dtype)
            shape = self._parameters[index][1]
            results[index] = tf.IndexedSlices(values, indices, tf.constant(shape, tf.int64))


def _kind(gradient: Gradient) -> str:
    if gradient is None:
        return "none"
    return "sparse" if isinstance(gradient, tf.IndexedSlices) else "dense"
