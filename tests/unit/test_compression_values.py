"""Methods by hand arithmetic."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from horo_lite.compression import Compression, as_compressor, is_compression, resolve
from horo_lite.errors import ArgumentError
from horo_lite.interfaces import Parameter
from tests.contracts.compression import Halve, fresh_states, host, run


def rows(*values: list[float]) -> list[list[np.ndarray]]:
    return [[np.array(row, np.float32)] for row in values]


def test_float16_means_of_large_values_do_not_overflow():
    step = run(Compression.fp16, rows([40000], [40000]))
    assert step.results[0].mean[0].tolist() == [40000]
    assert step.payload_bytes == [2, 2]


def test_float16_with_feedback_keeps_what_is_below_its_range():
    states = fresh_states(2, 1)
    run(Compression.with_feedback(Compression.fp16), rows([1e-8], [1e-8]), states)
    assert states[0][0]["residual"][0] == pytest.approx(1e-8, rel=1e-3)


def test_top_half_with_residuals():
    states = fresh_states(2, 1)
    step = run(Compression.topk(0.5), rows([0.1, -5, 3, 0], [4, 0.2, 0, -1]), states)
    np.testing.assert_allclose(step.results[1].mean[0], [2, -2.5, 1.5, -0.5], rtol=1e-6)
    np.testing.assert_allclose(states[0][0]["residual"], [0.1, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(states[1][0]["residual"], [0, 0.2, 0, 0], rtol=1e-6)
    assert step.payload_bytes == [16, 16]


def test_top_keeps_at_least_one_element():
    step = run(Compression.topk(0.001, feedback=False), rows([1, -3, 2], [1, -3, 2]))
    assert step.results[0].mean[0].tolist() == [0, -3, 0]


def test_sign_is_one_bit_and_the_mean_magnitude():
    step = run(Compression.sign(feedback=False), rows([1, -3, 2, 2], [1, 1, 1, -1]))
    assert step.results[0].mean[0].tolist() == [1.5, -0.5, 1.5, 0.5]
    assert step.payload_bytes == [4 + 1, 4 + 1]


SLOW_IMPORT = pytest.param("tensorflow", marks=pytest.mark.slow)


@pytest.mark.parametrize("framework", ["numpy", "torch", SLOW_IMPORT])
def test_the_casts_are_usable_as_horovods(framework):
    if framework == "numpy":
        tensor, integers = np.array([1.5, 2.5], np.float32), np.array([1, 2])
    else:
        module = pytest.importorskip(framework)
        make = module.tensor if framework == "torch" else module.constant
        tensor, integers = make([1.5, 2.5]), make([1, 2])
    for method, wire in ((Compression.fp16, "float16"), (Compression.bf16, "bfloat16")):
        small, ctx = method.compress(tensor)
        assert wire in str(small.dtype)
        back = method.decompress(small, ctx)
        assert back.dtype == tensor.dtype
        assert [float(x) for x in back] == [1.5, 2.5]
        assert method.decompress(*method.compress(integers)).dtype == integers.dtype
    assert Compression.none.compress(tensor) == (tensor, None) or framework != "torch"
    assert Compression.none.decompress(tensor, None) is tensor


class OwnInt8:
    """Integers can't be averaged on the way; each rank has a scale of its own."""

    @staticmethod
    def compress(tensor):
        scale = np.abs(tensor).max() / 127
        return np.rint(tensor / scale).astype(np.int8), scale

    @staticmethod
    def decompress(tensor, ctx):
        return tensor * ctx


def test_a_class_written_for_horovod_is_adapted():
    assert run(Halve, rows([1, -2], [3, 4])).results[0].mean[0].tolist() == [2, 1]
    mean = run(OwnInt8, rows([1, -0.5], [1, -0.5])).results[0].mean[0]
    np.testing.assert_allclose(mean, [1, -0.504], atol=0.004)
    mean = run(OwnInt8, rows([100, 0], [1, 1])).results[0].mean[0]
    np.testing.assert_allclose(mean, [50.5, 0.5], atol=0.4)


@pytest.mark.parametrize("wrong", ["topk", None, 3, object(), [Compression.fp16]])
def test_what_is_no_compression_is_refused_with_the_right_call(wrong):
    with pytest.raises(TypeError, match=r"compression=hvd\.Compression\.fp16"):
        resolve(wrong)
    assert not is_compression(wrong)


def test_no_compression_needs_no_compressor():
    assert resolve(Compression.none) is None
    assert resolve(Compression.none()) is None


@pytest.mark.parametrize("ratio", [0, -1, 1.5, "1", float("nan")])
def test_a_wrong_ratio_is_refused_with_the_right_call(ratio):
    with pytest.raises(ArgumentError, match=r"Compression\.topk\(0\.01\)"):
        Compression.topk(ratio)


def test_feedback_comes_with_the_methods_whose_paper_has_it():
    assert "with_feedback" in repr(resolve(Compression.topk))
    assert "with_feedback" not in repr(resolve(Compression.topk(feedback=False)))
    assert "with_feedback" not in repr(resolve(Compression.fp16))


def test_a_compressor_of_ones_own_needs_only_reduce():
    class Mine:
        def reduce(self, gradients, states, group):
            return (yield from as_compressor(Compression.none).reduce(gradients, states, group))

    assert run(Mine(), rows([1], [3])).results[0].mean[0].tolist() == [2]
    assert "0x" not in repr(as_compressor(Mine()))  # ranks compare it


def test_a_class_of_ones_own_is_made_an_object():
    class Mine:
        def reduce(self, gradients, states, group):
            return (yield from as_compressor(Compression.none).reduce(gradients, states, group))

    assert run(Mine, rows([1], [3])).results[0].mean[0].tolist() == [2]
    assert run(Compression.with_feedback(Mine), rows([1], [3])).results[0].mean[0].tolist() == [2]


class FirstFew(Compression.topk):
    """A subclass whose constructor takes other arguments."""

    def __init__(self, count):
        super().__init__(1.0)
        object.__setattr__(self, "count", count)

    def select(self, piece):
        return np.arange(min(self.count, len(piece)))


@pytest.mark.parametrize(
    "wrapped",
    [FirstFew(2), Compression.warmup(FirstFew(2), 0), Compression.min_size(FirstFew(2), 1)],
    ids=repr,
)
def test_a_subclass_of_a_method_is_bound_and_copied_as_it_is(wrapped):
    states = fresh_states(2, 1)
    again = pickle.loads(pickle.dumps(copy.deepcopy(as_compressor(wrapped))))
    step = run(again, rows([1, -3, 2], [3, -3, 2]), states, [Parameter("weight", (3,))])
    assert step.results[0].mean[0].tolist() == [2, -3, 0]
    assert states[1][0]["residual"].tolist() == [0, 0, 2]


class HalveTensors:
    """For torch's tensors, which have ``half()``; arrays have not."""

    @staticmethod
    def compress(tensor):
        return (tensor / 2).half(), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx) * 2


@pytest.mark.parametrize(
    "wrap",
    [
        lambda own: own,
        Compression.with_feedback,
        lambda own: Compression.warmup(own, 0),
        lambda own: Compression.min_size(own, 1),
        lambda own: Compression.per_layer({"w*": own}),
        lambda own: Compression.auto([own], trials=1),
        lambda own: Compression.warmup(Compression.per_layer({"*": Compression.with_feedback(own)}), 0),
    ],
)
def test_a_class_written_for_tensors_is_given_tensors_in_every_wrapper(wrap):
    torch = pytest.importorskip("torch")
    compressor = resolve(wrap(HalveTensors), torch.from_numpy)
    for _ in range(2):  # the second step is the class's own turn under auto
        step = run(resolve(compressor), rows([1, -2], [3, 4]), parameters=[Parameter("weight", (2,))])
    assert step.results[0].mean[0].tolist() == [2, 1]


def test_neighbours_in_memory_are_sent_without_a_copy():
    flat = np.arange(6, dtype=np.float32)
    request = next(as_compressor(Compression.none).reduce([flat[:2], flat[2:]], [{}, {}], _alone()))
    assert np.shares_memory(request.array, flat)


def _alone():
    from horo_lite.interfaces import Group

    return Group.whole(0, 1)


def test_host_reads_every_float():
    assert host(np.float16([1.5])).dtype == np.float64
