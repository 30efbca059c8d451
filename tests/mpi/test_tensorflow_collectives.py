"""Collectives on TensorFlow tensors: values, types and gradients, eager and in graphs."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

MODES = pytest.mark.parametrize("mode", ["eager", "graph"])


def run(mode, function, *arguments):
    """Call a function as it is, or as a graph."""
    return function(*arguments) if mode == "eager" else tf.function(function)(*arguments)


def total(hvd):
    return hvd.size() * (hvd.size() + 1) / 2


@MODES
def test_allreduce_average_sum_and_factors(hvd, mode):
    x = tf.fill([3, 2], float(hvd.rank() + 1))

    def reduce(x):
        return (
            hvd.allreduce(x),
            hvd.allreduce(x, op=hvd.Sum),
            hvd.allreduce(x, average=False),
            hvd.allreduce(x, op=hvd.Max),
            hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5),
        )

    mean, *sums = run(mode, reduce, x)
    np.testing.assert_allclose(mean, np.full((3, 2), total(hvd) / hvd.size()))
    for value, expected in zip(sums, [total(hvd), total(hvd), hvd.size(), total(hvd)], strict=True):
        np.testing.assert_allclose(value, np.full((3, 2), expected))


@MODES
def test_types_are_kept(hvd, mode):
    names = ["float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8", "int8"]
    given = [tf.cast(tf.range(5) + hvd.rank(), name) for name in names]
    for x, got in zip(given, run(mode, lambda x: [hvd.allreduce(t, op=hvd.Sum) for t in x], given), strict=True):
        assert got.dtype == x.dtype
        offset = hvd.size() * (hvd.size() - 1) / 2
        np.testing.assert_array_equal(tf.cast(got, tf.float64), np.arange(5) * hvd.size() + offset)


@MODES
def test_scalars_empty_tensors_and_bool(hvd, mode):
    def reduce(x, nothing, flag):
        return hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(nothing), hvd.allreduce(flag, op=hvd.Max)

    scalar, nothing, flag = run(
        mode, reduce, tf.constant(hvd.rank() + 1.0), tf.zeros([0, 4]), tf.constant(hvd.rank() == 0)
    )
    assert scalar.shape == () and float(scalar) == total(hvd)
    assert nothing.shape == (0, 4)
    assert bool(flag)


@MODES
def test_grouped_allreduce_of_dense_and_sparse(hvd, mode):
    def reduce(x):
        slices = tf.IndexedSlices(x[:1], tf.constant([hvd.rank()]), tf.constant([hvd.size(), 2]))
        return hvd.grouped_allreduce([x, slices, 2 * x], op=hvd.Average)

    one, slices, two = run(mode, reduce, tf.fill([3, 2], float(hvd.rank() + 1)))
    mean = total(hvd) / hvd.size()
    np.testing.assert_allclose(one, np.full((3, 2), mean))
    np.testing.assert_allclose(two, np.full((3, 2), 2 * mean))
    expected = np.repeat((np.arange(hvd.size()) + 1.0)[:, None], 2, 1) / hvd.size()
    np.testing.assert_allclose(tf.convert_to_tensor(slices), expected)


@MODES
def test_allgather_of_unequal_rows(hvd, mode):
    x = tf.fill([hvd.rank() + 1, 2], float(hvd.rank()))
    got = run(mode, hvd.allgather, x)
    expected = np.concatenate([np.full((r + 1, 2), float(r)) for r in range(hvd.size())])
    np.testing.assert_array_equal(got, expected)


@MODES
def test_broadcast_from_the_last_rank(hvd, mode):
    root = hvd.size() - 1
    got = run(mode, lambda x: hvd.broadcast(x, root), tf.fill([4], float(hvd.rank())))
    np.testing.assert_array_equal(got, np.full(4, float(root)))


@MODES
def test_alltoall_with_splits(hvd, mode):
    x = tf.repeat(tf.range(hvd.size()), tf.range(hvd.size()) + 1)  # r + 1 rows for rank r
    splits = tf.range(hvd.size()) + 1
    got, received = run(mode, lambda x: hvd.alltoall(x, splits), x)
    np.testing.assert_array_equal(got, np.full(hvd.size() * (hvd.rank() + 1), hvd.rank()))
    np.testing.assert_array_equal(received, np.full(hvd.size(), hvd.rank() + 1))
    equal = run(mode, hvd.alltoall, tf.range(hvd.size()))
    np.testing.assert_array_equal(equal, np.full(hvd.size(), hvd.rank()))


@MODES
def test_reducescatter(hvd, mode):
    x = tf.reshape(tf.range(float(2 * hvd.size())), [hvd.size(), 2])
    for op, factor in ((hvd.Sum, hvd.size()), (hvd.Average, 1)):
        got = run(mode, lambda x, op=op: hvd.reducescatter(x, op=op), x)
        np.testing.assert_allclose(got, x[hvd.rank() : hvd.rank() + 1] * factor)


@MODES
def test_gradients_follow_horovods_table(hvd, mode):
    """Each rank's loss weighs its output by (rank + 1)."""
    size, weight = hvd.size(), float(hvd.rank() + 1)
    mean = total(hvd) / size

    def gradients(x):
        results = []
        for operation in (
            lambda x: hvd.allreduce(x, op=hvd.Sum),
            lambda x: hvd.allreduce(x),
            hvd.allgather,
            lambda x: hvd.broadcast(x, 0),
            hvd.alltoall,
            lambda x: hvd.reducescatter(x, op=hvd.Sum),
            hvd.reducescatter,
            lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0),
            lambda x: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0),
        ):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = weight * tf.reduce_sum(operation(x))
            results.append(tape.gradient(loss, x))
        return results

    x = tf.ones([size, 2])
    got = run(mode, gradients, x)
    ones = np.ones((size, 2))
    by_rank = np.repeat((np.arange(size) + 1.0)[:, None], 2, 1)
    expected = [
        ones * total(hvd), ones * mean, ones * mean, ones * mean * (hvd.rank() == 0), by_rank, by_rank * size, by_rank,
        ones * total(hvd) * 6, by_rank * size * 6,
    ]
    for value, wanted in zip(got, expected, strict=True):
        np.testing.assert_allclose(value, wanted)


def test_variables_are_broadcast(hvd):
    variables = [tf.Variable(tf.fill([2, 2], float(hvd.rank()))), tf.Variable(hvd.rank())]
    hvd.broadcast_variables(variables, root_rank=hvd.size() - 1)
    np.testing.assert_array_equal(variables[0], np.full((2, 2), hvd.size() - 1.0))
    assert int(variables[1]) == hvd.size() - 1

    @tf.function
    def inside():
        hvd.broadcast_(variables[:1], 0)

    variables[0].assign(tf.fill([2, 2], float(hvd.rank() + 5)))
    inside()
    np.testing.assert_array_equal(variables[0], np.full((2, 2), 5.0))


def test_objects(hvd):
    assert hvd.broadcast_object({"epoch": hvd.rank()}, hvd.size() - 1) == {"epoch": hvd.size() - 1}
    assert hvd.broadcast_object_fn(0)(hvd.rank()) == 0
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def test_rank_and_size_as_tensors(hvd):
    @tf.function
    def inside():
        return hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.process_set_included_op(0)

    for values in (inside(), (hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), 1)):
        assert [int(value) for value in values] == [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), 1]


@pytest.mark.ranks(2, 3)
def test_shapes_that_differ_raise_on_every_rank(hvd):
    with pytest.raises(hvd.HorovodInternalError, match="shape"):
        hvd.allreduce(tf.zeros([3 + hvd.rank()]), name="differs")
    with pytest.raises(tf.errors.OpError, match="shape"):
        tf.function(lambda: hvd.allreduce(tf.zeros([3 + hvd.rank()]), name="differs"))()
    assert float(hvd.allreduce(1.0, op=hvd.Sum)) == hvd.size()


@pytest.mark.ranks(2, 3)
def test_independent_operations_in_graphs_of_different_order(hvd):
    """The executor may start either first; a loop and a branch have operations of their own."""

    @tf.function
    def both(x):
        a = hvd.allreduce(x, op=hvd.Sum)
        b = hvd.allreduce(2 * x, op=hvd.Sum)
        for _ in tf.range(3):
            x = hvd.allreduce(x, op=hvd.Average)
        c = tf.cond(x[0] > 0, lambda: hvd.allreduce(x, op=hvd.Sum), lambda: x)
        return a, b, c

    for _ in range(5):
        a, b, c = both(tf.ones([1000]))
        assert float(a[0]) == hvd.size() and float(b[0]) == 2 * hvd.size() and float(c[0]) == hvd.size()


def test_xla_says_what_to_set(hvd):
    with pytest.raises(Exception, match="jit_compile=False"):
        tf.function(lambda x: hvd.allreduce(x), jit_compile=True)(tf.ones([2]))


@pytest.mark.ranks(2)
def test_compression(hvd):
    x = tf.fill([4], 40000.0)
    np.testing.assert_allclose(hvd.allreduce(x, compression=hvd.Compression.fp16), x)

    class Halved:
        @staticmethod
        def compress(tensor):
            return tf.cast(tensor / 2, tf.float16), tensor.dtype

        @staticmethod
        def decompress(tensor, context):
            return tf.cast(tensor, context) * 2

    C = hvd.Compression
    wrapped = [C.min_size(Halved, 1), C.warmup(Halved, 0), C.per_layer({"*": Halved}), C.with_feedback(Halved)]
    for number, own in enumerate([Halved, *wrapped, C.min_size(C.per_layer({"own*": C.with_feedback(Halved)}), 1)]):
        np.testing.assert_allclose(hvd.allreduce(x, compression=own, name=f"own.{number}"), x)
