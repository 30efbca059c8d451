"""Where TensorFlow meets the engine: tensors as numpy arrays and back, and operations inside ``tf.function`` graphs.

Eager tensors cross without a copy in either direction (the engine's results where they are aligned to 64 bytes, as
TensorFlow asks). In a graph an operation is two nodes, ``submit`` and ``wait``, each a Python callback, so that what
does not depend on the result runs in between.

**No deadlock, with any number of executor threads.** The submits of a graph are chained by control dependencies, so
every rank submits the same operations in the same order, whatever the executor runs first; each wait follows its own
submit. Suppose ranks are stuck. Take the one that has submitted least, m operations: it is stuck in the wait of some
k <= m, but all others have submitted at least m, so operation k has all it needs. A wait drives the engine itself and
needs no second thread.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horo_lite.errors import ArgumentError

_ALIGNMENT_BYTES = 64  # TensorFlow aborts the process when a kernel meets a tensor that is not

do_not_convert = tf.autograph.experimental.do_not_convert
"""Marks what autograph need not rewrite when a user's function is traced: it would find nothing to do, slowly."""

Start = Callable[[list[Any]], Any]
"""From arrays to whatever ``Finish`` needs; must not block."""
Finish = Callable[[Any], Sequence[Any]]
"""Waits, and returns arrays."""


def to_array(tensor: Any) -> Any:
    """An eager tensor's, a variable's or a number's values: the tensor's own memory, to be read only."""
    if isinstance(tensor, tf.Variable):
        tensor = tensor.read_value()
    return np.asarray(tensor)


def to_tensor(array: Any) -> tf.Tensor:
    """An eager tensor of an array that nobody will write to again: of its memory where the alignment allows."""
    shareable = array.flags.c_contiguous and array.flags.writeable and array.nbytes
    if not shareable or array.ctypes.data % _ALIGNMENT_BYTES:
        return tf.convert_to_tensor(array)
    if array.dtype.name == "bfloat16":  # numpy's DLPack does not know it
        words = tf.experimental.dlpack.from_dlpack(array.view(np.uint16).__dlpack__())
        return tf.bitcast(words, tf.bfloat16)
    if array.dtype.kind not in "iufc":  # nor these
        return tf.convert_to_tensor(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def exchange(
    inputs: Sequence[Any], start: Start, finish: Finish, outputs: Sequence[tf.TensorSpec], label: str
) -> list[tf.Tensor]:
    """Carry out an operation of the engine on tensors, at once or as nodes of the graph that is being traced.

    Args:
        inputs: tensors, handed to ``start`` as arrays.
        start: submits; what it returns is handed to ``finish``.
        finish: waits.
        outputs: types and static shapes of what ``finish`` returns.
        label: a name for the nodes.
    """
    if tf.executing_eagerly():
        return [to_tensor(array) for array in finish(start([to_array(t) for t in inputs]))]
    ticket = submit(inputs, start, label)
    return wait(ticket, finish, outputs, label)


# --- graphs ------------------------------------------------------------------------------------------------------


class _Chain:
    """What is remembered of a graph while it is traced."""

    def __init__(self) -> None:
        self.last_submit: Any = None
        self.counters: dict[str, itertools.count[int]] = {}
        self.marks: dict[Any, Any] = {}


_under_way: dict[int, Any] = {}
_tickets = itertools.count(1)


def submit(inputs: Sequence[tf.Tensor], start: Start, label: str, after: Sequence[Any] = ()) -> tf.Tensor:
    """Add a submit node to the graph: the next in its chain, and later than ``after``. Returns its ticket."""
    refuse_xla()
    chain = _chain()

    def callback(*arrays: Any) -> Any:
        ticket = next(_tickets)
        _under_way[ticket] = start(list(arrays))
        return np.int64(ticket)

    before = [*after, *([] if chain.last_submit is None else [chain.last_submit])]
    with tf.control_dependencies(before):
        ticket = tf.numpy_function(callback, list(inputs), tf.int64, stateful=True, name=f"horo_lite_submit_{label}")
    ticket.set_shape(())
    chain.last_submit = ticket.op
    return ticket


def wait(
    tickets: tf.Tensor | Sequence[tf.Tensor], finish: Finish, outputs: Sequence[tf.TensorSpec], label: str
) -> list[tf.Tensor]:
    """Add the node that waits for one submit, or for several: then ``finish`` gets a list."""
    several = isinstance(tickets, (list, tuple))

    def callback(*numbers: Any) -> list[Any]:
        started = [_under_way.pop(int(number)) for number in numbers]
        return list(finish(started if several else started[0]))

    results = tf.numpy_function(
        callback, list(tickets) if several else [tickets], [spec.dtype for spec in outputs],
        stateful=True, name=f"horo_lite_wait_{label}",
    )
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    for result, spec in zip(results, outputs, strict=True):
        result.set_shape(spec.shape)
    return results


def marks() -> dict[Any, Any]:
    """A place on the graph being traced for what a caller must remember of it."""
    return _chain().marks


def graph_name(kind: str) -> str:
    """A name for an unnamed operation of the graph being traced, the same on ranks that run the same program.

    Ranks may trace a function a different number of times, so a count of all operations so far would not do: it is
    the function's name and the operation's place within it.
    """
    graph: Any = _graph()
    path = []
    while graph is not None and getattr(graph, "outer_graph", None) is not None:
        path.append(re.sub(r"_\d+", "", str(graph.name)))
        graph = graph.outer_graph
    place = next(_chain().counters.setdefault(kind, itertools.count()))
    return f"{kind}.{'/'.join(reversed(path))}.{place}"


def refuse_xla() -> None:
    """Raise when the graph being traced is to be compiled by XLA, which has no way to call back.

    Raises:
        ArgumentError: it is; says what to set.
    """
    if tf.__internal__.get_enclosing_xla_context() is not None:
        raise ArgumentError(
            "this function is compiled by XLA (jit_compile=True), and an exchange with other ranks cannot be part of "
            "a compiled function: pass jit_compile=False to tf.function or to model.compile(); to keep XLA for the "
            "model, compile its forward pass alone and call the exchange outside"
        )


def _graph() -> Any:
    return tf.compat.v1.get_default_graph()


def _chain() -> _Chain:
    graph = _graph()
    chain: _Chain | None = getattr(graph, "_horo_lite_chain", None)
    if chain is None:
        chain = graph._horo_lite_chain = _Chain()  # kept on the graph, so that it goes when the graph goes
    return chain
