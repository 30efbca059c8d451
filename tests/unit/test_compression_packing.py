"""Payloads: bit for bit what the formula says, for any sizes and values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from horo_lite.compression.base import Layout
from horo_lite.compression.codecs import (
    Float8Codec,
    PowerOfTwoCodec,
    SignCodec,
    UniformCodec,
    VoteCodec,
)
from horo_lite.compression.exchange import chunks
from horo_lite.compression.numpy_backend import NumpyBackend

backend = NumpyBackend()
SETTINGS = settings(max_examples=40, deadline=None)

floats = st.floats(-1e6, 1e6, width=32)
buckets = st.lists(
    arrays.arrays(np.float32, st.integers(0, 70), elements=floats), min_size=1, max_size=4
)


def joined(pieces: list[np.ndarray]) -> tuple[np.ndarray, Layout]:
    return np.concatenate(pieces), Layout(tuple(map(len, pieces)))


def decoded(codec, pieces):
    flat, layout = joined(pieces)
    payload = codec.encode(flat, layout, backend.generator(1))
    assert payload.nbytes == codec.payload_bytes(layout, "float32")
    return layout.split(codec.decode(payload, layout, "float32"))


@given(buckets)
@SETTINGS
def test_signs(pieces):
    for piece, out in zip(pieces, decoded(SignCodec(), pieces), strict=True):
        if len(piece):
            expected = np.where(piece < 0, -1, 1) * np.abs(piece).mean(dtype=np.float64)
            np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-44)  # the smallest numbers are rounded


@given(buckets)
@SETTINGS
def test_votes(pieces):
    for piece, out in zip(pieces, decoded(VoteCodec(), pieces), strict=True):
        np.testing.assert_array_equal(out, np.where(piece < 0, -1, 1) * piece.any())


@given(buckets, st.sampled_from([8, 4, 2]), st.booleans())
@SETTINGS
def test_levels_are_within_one_step(pieces, bits, stochastic):
    codec = UniformCodec(bits, stochastic)
    for piece, out in zip(pieces, decoded(codec, pieces), strict=True):
        step = np.abs(piece).max(initial=0) / codec.levels
        bound = step if stochastic else step / 2
        assert (np.abs(out - piece) <= bound * 1.001 + 1e-29).all()


@given(st.lists(st.integers(0, 3), max_size=100), st.sampled_from([4, 2]))
@SETTINGS
def test_small_integers_are_exact_in_few_bits(values, bits):
    levels = UniformCodec(bits).levels
    piece = np.array([*(v % (levels + 1) for v in values), levels], np.float32)
    assert decoded(UniformCodec(bits), [piece])[0].tolist() == piece.tolist()


@given(buckets)
@SETTINGS
def test_eight_bit_floats_have_four_bits_of_precision(pieces):
    for piece, out in zip(pieces, decoded(Float8Codec(), pieces), strict=True):
        peak = np.abs(piece).max(initial=0)
        assert (np.abs(out - piece) <= np.abs(piece) * 2**-4 * 1.001 + peak * 2**-17 + 1e-29).all()


def test_eight_bit_floats_are_rounded_as_ml_dtypes_does():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.random.default_rng(0).uniform(-448, 448, 100_000).astype(np.float32)
    exact = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    exact = np.sort(exact[np.isfinite(exact)])
    ties = (exact[1:] + exact[:-1]) / 2
    values = np.concatenate(
        [values, values * 1e-5, exact, ties, np.nextafter(ties, 500), np.nextafter(ties, -500)]
    )
    codes = np.empty(len(values), np.uint8)
    backend.encode_float8(codes, values)
    np.testing.assert_array_equal(codes, values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@given(buckets)
@SETTINGS
def test_powers_of_two_enclose_the_value(pieces):
    for piece, out in zip(pieces, decoded(PowerOfTwoCodec(), pieces), strict=True):
        normal = np.abs(piece) >= np.finfo(np.float32).tiny
        ratio = out[normal] / piece[normal]
        assert ((ratio > 0.5) & (ratio <= 2)).all()
        assert np.isin(np.frexp(out)[0], [0, 0.5, -0.5]).all()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 9))
@SETTINGS
def test_chunks_cover_the_bucket_once(sizes, ranks):
    layout = Layout(tuple(sizes))
    parts = chunks(layout, ranks)
    assert len(parts) == ranks
    assert [i for part in parts for i in range(layout.total)[part.cut]] == list(range(layout.total))
    assert [sum(part.layout.sizes[i] for part in parts) for i in range(len(sizes))] == sizes
    for part in parts:
        assert part.layout.total == part.cut.stop - part.cut.start
        assert part.cut.start % 8 == 0 or part.cut.start == layout.total


@given(arrays.arrays(np.float32, st.integers(1, 300), elements=floats), st.integers(1, 300))
@SETTINGS
def test_the_largest_are_exactly_so_many(values, count):
    count = min(count, len(values))
    chosen = backend.largest(values, count)
    assert len(set(chosen.tolist())) == count
    rest = np.delete(values, chosen)
    assert np.abs(values[chosen]).min() >= np.abs(rest).max(initial=0)


@pytest.mark.parametrize("case", ["normal", "ties", "one large stride", "mostly zero", "NaN"])
def test_the_sampled_threshold_never_changes_the_choice(case):
    values = np.random.default_rng(0).standard_normal(1 << 17).astype(np.float32)
    if case == "ties":
        values = np.round(values)
    elif case == "one large stride":
        values[:: len(values) // (1 << 14)] *= 1000
    elif case == "mostly zero":
        values[values < 3] = 0
    elif case == "NaN":
        values[7] = np.nan
    count = len(values) // 100
    chosen = backend.largest(values, count)
    assert len(set(chosen.tolist())) == count
    expected = np.sort(np.abs(values))[-count:]  # NaN sorts last
    np.testing.assert_array_equal(np.sort(np.abs(values[chosen])), expected)


def test_blocks_of_a_long_gradient_meet_without_a_seam():
    """Longer than a cache block, and not a multiple of eight."""
    piece = np.random.default_rng(0).standard_normal((1 << 15) * 2 + 13).astype(np.float32)
    (signs,) = decoded(SignCodec(), [piece])
    np.testing.assert_array_equal(np.sign(signs), np.sign(piece))
    for bits in (8, 4, 2):
        (levels,) = decoded(UniformCodec(bits), [piece])
        assert (
            np.abs(levels - piece).max() <= np.abs(piece).max() / UniformCodec(bits).levels / 1.999
        )
    (powers,) = decoded(PowerOfTwoCodec(), [piece])
    np.testing.assert_array_equal(np.sign(powers), np.sign(piece))
