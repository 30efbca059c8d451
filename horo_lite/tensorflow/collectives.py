"""The collectives on TensorFlow tensors, eager and in graphs, with Horovod's signatures and gradients.

Each is a thin skin: ``horo_lite.functions`` carries it out, ``bridge`` takes it there and back. The gradients are
Horovod's:

=============  ==========================================================================================
operation      gradient of the input, from the gradient dy of the output
=============  ==========================================================================================
allreduce      allreduce(dy), with the same op and factors
allgather      this rank's rows of allreduce(dy, Average)
broadcast      allreduce(dy, Average) on the root, zero elsewhere
alltoall       alltoall(dy), with the received splits
reducescatter  allgather(dy), times the number of ranks for Sum, times the factors
=============  ==========================================================================================

``device_dense``, ``device_sparse`` and ``ignore_name_scope`` are accepted for Horovod's sake: exchanges are made in
host memory, and names are never scoped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horo_lite import functions
from horo_lite.context import current
from horo_lite.errors import ArgumentError
from horo_lite.functions import Average, Sum, reduction_of
from horo_lite.interfaces import Reduction
from horo_lite.process_sets import ProcessSet, global_process_set
from horo_lite.tensorflow.bridge import do_not_convert, exchange, graph_name
from horo_lite.tensorflow.compression import Compression, for_tensorflow


def _name(name: str | None, kind: str) -> str | None:
    """The user's name; without one the engine counts eager calls, and in a graph the place in it counts."""
    return name if name is not None or tf.executing_eagerly() else graph_name(kind)


def _gradient_name(name: str | None, suffix: str = "") -> str | None:
    return None if name is None else f"{name}.gradient{suffix}"


def _dense(tensor: Any) -> tf.Tensor:
    return tf.convert_to_tensor(tensor)


def _same(tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]


def _one(handle: Any) -> list[Any]:
    return [functions.synchronize(handle)]


def _differentiable(
    forward: Callable[..., Any], backward: Callable[..., Any], tensors: Sequence[tf.Tensor]
) -> Any:
    """Call ``forward(*tensors)`` so that gradients of its results become ``backward(*gradients)``."""

    @tf.custom_gradient
    def operation(*inputs: tf.Tensor) -> Any:
        return forward(*inputs), backward

    return operation(*tensors)


# --- allreduce ---------------------------------------------------------------------------------------------------


@do_not_convert
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor over all ranks; ``tf.IndexedSlices`` are gathered (Sum and Average only).

    Args:
        tensor: a tensor, a variable, an array, or ``tf.IndexedSlices``.
        average: deprecated: True for Average, False for Sum.
        compression: what goes on the wire (``hvd.Compression``).
        op: Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: every input is multiplied by it.
        postscale_factor: the result is multiplied by it.
        name: what it is matched by.
        process_set: the ranks that take part.

    Raises:
        DisagreementError: ranks passed different shapes, types or arguments (in a graph: ``tf.errors.OpError``).
    """
    reduction = reduction_of(average, op)
    if isinstance(tensor, tf.IndexedSlices):
        return _allreduce_slices(tensor, reduction, prescale_factor, postscale_factor, name, process_set)
    results = _allreduce_dense(
        [_dense(tensor)], compression, reduction, prescale_factor, postscale_factor,
        _name(name, "allreduce"), process_set,
    )
    return results[0]


@do_not_convert
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors as one unit; dense ones and ``tf.IndexedSlices`` may be mixed. See ``allreduce``."""
    reduction = reduction_of(average, op)
    tensors = list(tensors)
    results: list[Any] = list(tensors)
    sparse = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    dense = [i for i in range(len(tensors)) if i not in sparse]
    if dense:
        reduced = _allreduce_dense(
            [_dense(tensors[i]) for i in dense], compression, reduction, prescale_factor, postscale_factor,
            _name(name, "allreduce"), process_set,
        )
        for i, tensor in zip(dense, reduced, strict=True):
            results[i] = tensor
    for i in sparse:
        label = None if name is None else f"{name}.{i}"
        results[i] = _allreduce_slices(
            tensors[i], reduction, prescale_factor, postscale_factor, label, process_set
        )
    return results


def _allreduce_dense(
    tensors: list[tf.Tensor],
    compression: Any,
    op: Reduction,
    prescale: float,
    postscale: float,
    name: str | None,
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    compressor = for_tensorflow(compression)

    def start(arrays: list[Any]) -> Any:
        make = functions.make_allreduce(arrays, None, name, op, prescale, postscale, compressor, grouped=True)
        return functions.start(process_set, "allreduce", name, make)

    def forward(*inputs: tf.Tensor) -> list[tf.Tensor]:
        return exchange(inputs, start, functions.synchronize, _same(inputs), "allreduce")

    def backward(*gradients: tf.Tensor) -> list[tf.Tensor]:
        return _allreduce_dense(
            list(gradients), None, op, prescale, postscale, _gradient_name(name), process_set
        )

    return list(_differentiable(forward, backward, tensors))


def _allreduce_slices(
    slices: tf.IndexedSlices,
    op: Reduction,
    prescale: float,
    postscale: float,
    name: str | None,
    process_set: ProcessSet,
) -> tf.IndexedSlices:
    """All ranks' rows, one after the other: whoever applies them adds those of equal index."""
    if op not in (Average, Sum):
        raise ArgumentError(
            f"op={op.name.title()} of tf.IndexedSlices: only Average and Sum are possible; "
            "use tf.convert_to_tensor(slices), or sparse_as_dense=True in an optimizer"
        )
    factor = prescale * postscale / (process_set.size() if op is Average else 1)
    values, indices = grouped_allgather([slices.values, slices.indices], name=name, process_set=process_set)
    if factor != 1.0:
        values = values * tf.cast(factor, values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


# --- allgather ---------------------------------------------------------------------------------------------------


@do_not_convert
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate every rank's tensor along the first dimension, which may differ between ranks."""
    return grouped_allgather([tensor], _name(name, "allgather"), ignore_name_scope, process_set)[0]


@do_not_convert
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Gather several tensors as one unit. See ``allgather``."""
    label = _name(name, "allgather")
    dense = [_dense(tensor) for tensor in tensors]

    def start(arrays: list[Any]) -> Any:
        return functions.grouped_allgather_async(arrays, label, process_set)

    def forward(*inputs: tf.Tensor) -> list[tf.Tensor]:
        gathered = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in inputs]
        return exchange(inputs, start, functions.synchronize, gathered, "allgather")

    def backward(*gradients: tf.Tensor) -> list[tf.Tensor]:
        reduced = _allreduce_dense(
            list(gradients), None, Average, 1.0, 1.0, _gradient_name(label), process_set
        )
        rows = tf.stack([tf.size(t) if t.shape.rank == 0 else tf.shape(t)[0] for t in dense])  # (tensors,)
        all_rows = _gather_rows(rows, _gradient_name(label, ".rows"), process_set)  # (ranks, tensors)
        own = process_set.rank()
        return [
            tf.reshape(
                gradient[tf.reduce_sum(all_rows[:own, i]) : tf.reduce_sum(all_rows[: own + 1, i])],
                tf.shape(dense[i]),
            )
            for i, gradient in enumerate(reduced)
        ]

    return list(_differentiable(forward, backward, dense))


def _gather_rows(rows: tf.Tensor, name: str | None, process_set: ProcessSet) -> tf.Tensor:
    spec = tf.TensorSpec([None, rows.shape[0]], rows.dtype)

    def start(arrays: list[Any]) -> Any:
        return functions.allgather_async(arrays[0][np.newaxis], name, process_set)

    return exchange([rows], start, _one, [spec], "allgather")[0]


# --- broadcast, alltoall, reducescatter --------------------------------------------------------------------------


@do_not_convert
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Give every rank the tensor of ``root_rank``, a global rank."""
    label = _name(name, "broadcast")

    def start(arrays: list[Any]) -> Any:
        return functions.broadcast_async(arrays[0], root_rank, label, process_set)

    def forward(source: tf.Tensor) -> tf.Tensor:
        return exchange([source], start, _one, _same([source]), "broadcast")[0]

    def backward(gradient: tf.Tensor) -> tf.Tensor:
        reduced = _allreduce_dense([gradient], None, Average, 1.0, 1.0, _gradient_name(label), process_set)[0]
        return reduced if current().rank == root_rank else tf.zeros_like(reduced)

    return _differentiable(forward, backward, [_dense(tensor)])


@do_not_convert
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send slices of the first dimension to every rank and concatenate what every rank sent here.

    Args:
        splits: rows for each rank, a 1-d int32 tensor or list; None for equal parts.

    Returns:
        The received tensor; with ``splits``, a pair of it and the rows received from each rank.
    """
    output, received = _alltoall(_dense(tensor), splits, _name(name, "alltoall"), process_set)
    return output if splits is None else (output, received)


def _alltoall(
    tensor: tf.Tensor, splits: Any, label: str | None, process_set: ProcessSet
) -> tuple[tf.Tensor, tf.Tensor]:
    parts = [] if splits is None else [tf.cast(tf.convert_to_tensor(splits), tf.int32)]

    def start(arrays: list[Any]) -> Any:
        return functions.alltoall_async(arrays[0], arrays[1] if parts else None, label, process_set)

    def finish(handle: Any) -> list[Any]:
        output, received = functions.synchronize(handle)
        return [output, np.array(received, np.int32)]

    def forward(source: tf.Tensor, *parts: tf.Tensor) -> list[tf.Tensor]:
        specs = [tf.TensorSpec([None, *source.shape[1:]], source.dtype), tf.TensorSpec([None], tf.int32)]
        return exchange([source, *parts], start, finish, specs, "alltoall")

    @tf.custom_gradient
    def operation(source: tf.Tensor) -> Any:
        output, received = forward(source, *parts)

        def backward(gradient: tf.Tensor, *_: Any) -> tf.Tensor:
            return _alltoall(gradient, received, _gradient_name(label), process_set)[0]

        return (output, received), backward

    result: tuple[tf.Tensor, tf.Tensor] = operation(tensor)
    return result


@do_not_convert
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Reduction = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce, and leave each rank its part of the first dimension (the first ranks get a row more if uneven).

    Args:
        op: Average or Sum.
        compression: accepted as in Horovod; 16-bit casts only, applied to what is sent.
    """
    return grouped_reducescatter(
        [tensor], device_dense, compression, op, process_set, ignore_name_scope, prescale_factor,
        postscale_factor, name=name,
    )[0]


@do_not_convert
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Reduction = Average,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Reduce-scatter several tensors as one unit. See ``reducescatter``."""
    label = _name(name, "reducescatter")

    def start(arrays: list[Any]) -> Any:
        return functions.grouped_reducescatter_async(
            arrays, label, op, process_set, prescale_factor, postscale_factor
        )

    def forward(*inputs: tf.Tensor) -> list[tf.Tensor]:
        scattered = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in inputs]
        return exchange(inputs, start, functions.synchronize, scattered, "reducescatter")

    def backward(*gradients: tf.Tensor) -> list[tf.Tensor]:
        factor = prescale_factor * postscale_factor * (process_set.size() if op == Sum else 1)
        scaled = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
        return grouped_allgather(scaled, _gradient_name(label), process_set=process_set)

    compress, decompress = _casts(compression)
    dense, contexts = zip(*[compress(_dense(tensor)) for tensor in tensors], strict=True)
    results = _differentiable(forward, backward, list(dense))
    return [decompress(result, context) for result, context in zip(results, contexts, strict=True)]


def _casts(compression: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What a compression does to one tensor where no bucket is: Horovod's two static methods."""
    compression = Compression.none if compression is None else compression
    if callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None)):
        return compression.compress, compression.decompress
    raise ArgumentError(
        f"compression={compression!r}: a reduce-scatter sends the tensor itself; pass Compression.none, .fp16 or .bf16"
    )
