"""Compressors that break their promises: the message says which one, and nothing wrong is handed on."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from horo_lite.compression import as_compressor
from horo_lite.engine.compressed import compressed
from horo_lite.interfaces import AllToAllRequest, GatherRequest, Group, Reduced, SumRequest


class Faulty:
    """Does what it is told."""

    def __init__(self, requests, result):
        self.requests, self.result = requests, result

    def __repr__(self):
        return "Faulty"

    def reduce(self, gradients, states, group):
        yield from self.requests
        return self.result


class Ordinary(Faulty):
    """A function in place of a generator."""

    def reduce(self, gradients, states, group):
        return Reduced(gradients, gradients)


def drive(compressor):
    fabric = SimpleNamespace(
        group=Group.whole(0, 1), stats=SimpleNamespace(encode_s=0.0, wire_s=0.0, decode_s=0.0)
    )
    gradients = [np.ones(4, np.float32), np.ones(2, np.float32)]
    generator = compressed(as_compressor(compressor), gradients, [{}, {}], fabric)
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


def style(compress, decompress=lambda tensor, ctx: tensor):
    return SimpleNamespace(compress=compress, decompress=decompress)


FITTING = [np.zeros(4), np.zeros(2)]


@pytest.mark.parametrize(
    "compressor, message",
    [
        (Ordinary([], None), r"Faulty: reduce\(\) returned Reduced; expected a generator"),
        (Faulty([5], None), r"yielded int; expected one of SumRequest, GatherRequest"),
        (Faulty([SumRequest(np.ones((2, 3)))], None), r"yielded SumRequest of shape \(2, 3\); expected flat arrays"),
        (Faulty([SumRequest(np.float32(1))], None), r"yielded SumRequest of shape \(\); expected flat arrays"),
        (Faulty([GatherRequest(b"text")], None), r"yielded GatherRequest of bytes; expected flat arrays"),
        (Faulty([AllToAllRequest([None])], None), r"yielded AllToAllRequest of NoneType; expected flat arrays"),
        (Faulty([AllToAllRequest([FITTING[0]] * 2)], None), r"AllToAllRequest of 2 payloads; expected one for each"),
        (style(lambda t: t), r"compress\(tensor\) returned ndarray; expected two, \(tensor, ctx\)"),
        (style(lambda t: (t, None, 1)), r"compress\(tensor\) returned tuple; expected two, \(tensor, ctx\)"),
        (style(lambda t: (b"text", None)), r"compress\(tensor\) returned tuple; expected two"),
        (Faulty([], None), r"ended with NoneType; expected Reduced"),
        (Faulty([], np.zeros(6)), r"ended with ndarray; expected Reduced"),
        (Faulty([], Reduced([np.zeros(1), np.zeros(2)], FITTING)), r"\[1, 2\] elements; expected \[4, 2\]"),
        (Faulty([], Reduced([np.zeros(4)], FITTING)), r"\[4\] elements; expected \[4, 2\]"),
        (Faulty([], Reduced([np.float32(1), np.zeros(2)], FITTING)), r"expected Reduced"),
    ],
)  # fmt: skip
def test_the_message_says_what_was_given_and_what_was_expected(compressor, message):
    with pytest.raises((TypeError, ValueError), match=message):
        drive(compressor)


def test_a_pair_that_fits_is_taken():
    assert drive(Faulty([], (FITTING, FITTING))).mean is FITTING


def test_a_decompress_that_returns_nothing():
    compressor = as_compressor(style(lambda tensor: (tensor, None), lambda tensor, ctx: None))
    work = compressor.reduce([np.ones(4, np.float32)], [{}], Group.whole(0, 1))
    request = next(work)
    with pytest.raises(TypeError, match=r"decompress\(tensor, ctx\) returned NoneType; expected a tensor"):
        work.send(request.array)
