"""Horovod's elastic names for TensorFlow's own variables and graphs, in a world of fixed size."""

from __future__ import annotations

import pytest

tf = pytest.importorskip("tensorflow")


@pytest.mark.ranks(1, 2)
def test_tensorflow_state(hvd):
    variable = tf.Variable([float(hvd.rank())])
    state = hvd.elastic.TensorFlowState([variable], step=hvd.rank())
    state.sync()
    assert variable.numpy().tolist() == [0.0] and state.step == 0
    variable.assign([5.0])
    state.step = 5
    state.commit()
    variable.assign([7.0])
    state.step = 7
    state.restore()
    assert variable.numpy().tolist() == [5.0] and state.step == 5
    with pytest.raises(ValueError, match="session"):
        hvd.elastic.TensorFlowState([variable], session=object())


@pytest.mark.ranks(2)
def test_an_operation_that_fails_in_a_graph_is_taken_for_what_it_is(hvd):
    """Ranks disagree once, within a tf.function: the error of the graph is the one that training recovers from."""
    state = hvd.elastic.TensorFlowState([tf.Variable(0.0)], tries=0)

    @hvd.elastic.run
    def train(state):
        state.tries += 1
        state.commit()
        elements = 2 + (hvd.rank() if state.tries == 1 else 0)
        return tf.function(lambda: hvd.allreduce(tf.ones([elements]), name="once", op=hvd.Sum))()

    assert train(state).numpy().tolist() == [2.0, 2.0]
    assert state.tries == 2
