"""Distributed gradient tapes, eager and in graphs."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

MODES = pytest.mark.parametrize("mode", ["eager", "graph"])


def run(mode, function):
    return function() if mode == "eager" else tf.function(function)()


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_gradients_are_averaged(hvd, mode):
    a, b, unused = tf.Variable([1.0, 2.0]), tf.Variable(3.0), tf.Variable([7.0])

    def step():
        with tf.GradientTape() as tape:
            loss = (hvd.rank() + 1.0) * (tf.reduce_sum(a) + 2 * b)
        return hvd.DistributedGradientTape(tape).gradient(loss, [a, {"b": b}, unused])

    for _ in range(2):
        first, second, third = run(mode, step)
        mean = (hvd.size() + 1) / 2
        np.testing.assert_allclose(first, [mean, mean])
        np.testing.assert_allclose(second["b"], 2 * mean)
        assert third is None


@pytest.mark.ranks(2, 3)
@MODES
def test_keywords_of_gradient(hvd, mode):
    a, unused = tf.Variable([1.0, 2.0]), tf.Variable([7.0])

    def step():
        with hvd.DistributedGradientTape(tf.GradientTape(persistent=True), op=hvd.Sum) as tape:
            target = a * (hvd.rank() + 1.0)
        single = tape.gradient(target, a)
        zero = tape.gradient(target, [a, unused], unconnected_gradients=tf.UnconnectedGradients.ZERO)
        weighted = tape.gradient(target, [a], output_gradients=[tf.constant([1.0, 10.0])])
        return single, zero, weighted

    total = hvd.size() * (hvd.size() + 1) / 2
    single, zero, weighted = run(mode, step)
    np.testing.assert_allclose(single, [total, total])
    np.testing.assert_allclose(zero[0], [total, total])
    np.testing.assert_allclose(zero[1], [0.0])
    np.testing.assert_allclose(weighted[0], [total, 10 * total])


@pytest.mark.ranks(2, 3)
@MODES
def test_sparse_gradients_and_groups(hvd, mode):
    table, dense = tf.Variable(tf.zeros([4, 2])), tf.Variable(tf.zeros([3]))

    def step(**options):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [hvd.rank(), 0])) + tf.reduce_sum(dense)
        return hvd.DistributedGradientTape(tape, **options).gradient(loss, [table, dense])

    expected = np.zeros((4, 2))
    for rank in range(hvd.size()):
        expected[[rank]] += 1 / hvd.size()
        expected[[0]] += 1 / hvd.size()
    for options in ({}, {"sparse_as_dense": True}, {"groups": [[table, dense]]}, {"num_groups": 1}):
        got, ones = run(mode, lambda options=options: step(**options))
        np.testing.assert_allclose(tf.convert_to_tensor(got), expected, rtol=1e-6)
        assert isinstance(got, tf.IndexedSlices) == (not options.get("sparse_as_dense", False))
        np.testing.assert_allclose(ones, np.ones(3))


@pytest.mark.ranks(2)
@MODES
def test_local_sources(hvd, mode):
    a, b = tf.Variable(0.0), tf.Variable(0.0)

    def step():
        with tf.GradientTape() as tape:
            loss = (hvd.rank() + 1.0) * (a + b)
        distributed = hvd.DistributedGradientTape(tape)
        distributed.register_local_source(b)
        return distributed.gradient(loss, [a, b])

    shared, local = run(mode, step)
    assert float(shared) == 1.5 and float(local) == (hvd.rank() + 1) / 2


@pytest.mark.ranks(2, 3)
def test_two_exchanges_of_one_graph_use_the_same_buckets(hvd):
    a = tf.Variable(tf.zeros([100]))

    @tf.function
    def step():
        with tf.GradientTape(persistent=True) as tape:
            one, two = tf.reduce_sum(a), 2 * tf.reduce_sum(a) * (hvd.rank() + 1.0)
        distributed = hvd.DistributedGradientTape(tape)
        return distributed.gradient(one, [a])[0], distributed.gradient(two, [a])[0]

    for _ in range(3):
        one, two = step()
        np.testing.assert_allclose(one, np.ones(100))
        np.testing.assert_allclose(two, np.full(100, hvd.size() + 1.0))


@pytest.mark.ranks(2)
def test_a_gradient_kept_from_an_earlier_step_stays_as_it_was(hvd):
    a = tf.Variable(tf.zeros([1000]))

    def step(factor):
        with tf.GradientTape() as tape:
            loss = factor * tf.reduce_sum(a)
        return hvd.DistributedGradientTape(tape).gradient(loss, a)

    for call in (step, tf.function(step)):
        first = call(tf.constant(1.0))
        call(tf.constant(5.0))
        np.testing.assert_allclose(first, np.ones(1000))


@pytest.mark.ranks(2)
@MODES
def test_many_large_gradients_in_a_loop(hvd, mode):
    variables = [tf.Variable(tf.ones([300, 300 + i])) for i in range(12)]

    def step():
        for _ in tf.range(3):
            with tf.GradientTape() as tape:
                loss = tf.add_n([(hvd.rank() + 1.0) * tf.reduce_sum(v * v) / 2 for v in variables])
            gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.assign_sub(0.1 * gradient)

    run(mode, step)
    for variable in variables:
        np.testing.assert_allclose(variable, np.full(variable.shape, (1 - 0.15) ** 3), rtol=1e-5)
