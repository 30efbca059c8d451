"""Codecs: a bucket of floats as a payload of bytes, and back.

A payload is one flat array of bytes: first the scales, one per gradient, then the codes of each gradient, each
starting on a byte of its own. The receiver knows the layout, so there is no header.

A gradient that holds infinity or NaN has a scale that is not finite, and so decodes to values that are not finite.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np

from horo_lite.arrays import item_bytes, type_name
from horo_lite.compression.backend import Backend, backend_of, quiet
from horo_lite.compression.base import Layout
from horo_lite.interfaces import Array

TINY = 2.0**-100
"""A gradient whose largest magnitude is smaller is sent as zero: the inverse of its step could overflow."""


@dataclasses.dataclass(frozen=True)
class Codec:
    """The frame of a payload; subclasses encode and decode one gradient."""

    scaled: ClassVar[bool] = True

    def code_bytes(self, elements: int) -> int:
        """The size of one gradient's codes."""
        raise NotImplementedError

    def encode_piece(self, backend: Backend, piece: Array, codes: Array, random: Any) -> Any:
        """Fill ``codes`` (bytes) from a non-empty flat array; returns its scale."""
        raise NotImplementedError

    def decode_piece(
        self, backend: Backend, name: str, scale: Any, codes: Array, out: Array
    ) -> None:
        """Fill ``out``, which has the type ``name``, from codes and scale."""
        raise NotImplementedError

    def payload_bytes(self, layout: Layout, name: str) -> int:
        """The size of the payload of a bucket of floats of the type ``name``."""
        return self._scale_bytes(layout, name) + sum(map(self.code_bytes, layout.sizes))

    @quiet
    def encode(self, flat: Array, layout: Layout, random: Any = None) -> Array:
        """The payload of a bucket of float32 or float64; ``random`` is the backend's generator."""
        backend, name = backend_of(flat), type_name(flat)
        payload = backend.empty(self.payload_bytes(layout, name), "uint8")
        scales, all_codes = self._columns(payload, layout, name, backend)
        for index, (piece, codes) in enumerate(zip(layout.split(flat), all_codes, strict=True)):
            scale = self.encode_piece(backend, piece, codes, random) if len(piece) else 0.0
            if self.scaled:
                scales[index] = scale
        return payload

    @quiet
    def decode(self, payload: Array, layout: Layout, name: str) -> Array:
        """The bucket that a payload stands for, as a new flat array of the type ``name``."""
        backend = backend_of(payload)
        out = backend.empty(layout.total, name)
        scales, all_codes = self._columns(payload, layout, name, backend)
        for index, (piece, codes) in enumerate(zip(layout.split(out), all_codes, strict=True)):
            if len(piece):
                self.decode_piece(
                    backend, name, scales[index] if self.scaled else None, codes, piece
                )
        return out

    def _scale_bytes(self, layout: Layout, name: str) -> int:
        return len(layout.sizes) * item_bytes(name) if self.scaled else 0

    def _columns(
        self, payload: Array, layout: Layout, name: str, backend: Backend
    ) -> tuple[Array, list[Array]]:
        end = self._scale_bytes(layout, name)
        scales = backend.view(payload[:end], name)
        return scales, Layout(tuple(map(self.code_bytes, layout.sizes))).split(payload[end:])


@dataclasses.dataclass(frozen=True)
class SignCodec(Codec):
    """One bit per element, set where it is negative; the scale is the mean magnitude. Zero decodes as positive."""

    def code_bytes(self, elements: int) -> int:
        return -(-elements // 8)

    def encode_piece(self, backend: Backend, piece: Array, codes: Array, random: Any) -> Any:
        for cut in backend.blocks(len(piece)):
            packed = backend.pack_bits(piece[cut] < 0)
            codes[cut.start // 8 : cut.start // 8 + len(packed)] = packed
        return self.scale(backend, piece)

    def scale(self, backend: Backend, piece: Array) -> Any:
        """The magnitude that every element decodes to: of all constants, the nearest to the piece."""
        return backend.mean_abs(piece)

    def decode_piece(
        self, backend: Backend, name: str, scale: Any, codes: Array, out: Array
    ) -> None:
        table = _sign_table(name)
        for cut in backend.blocks(len(out)):
            block = out[cut]
            signs = backend.take(table, codes[cut.start // 8 : -(-cut.stop // 8)]).reshape(-1)
            backend.xp.multiply(signs[: len(block)], scale, out=block)


@dataclasses.dataclass(frozen=True)
class VoteCodec(SignCodec):
    """One bit per element that decodes to 1 or -1, whatever the magnitudes: a vote. All zeros decode to zeros."""

    def scale(self, backend: Backend, piece: Array) -> Any:
        peak = backend.peak(piece)
        return backend.xp.where(peak - peak == 0, backend.xp.sign(peak), peak - peak)


@functools.cache
def _sign_table(name: str) -> np.ndarray[Any, Any]:
    """Eight signs for every byte."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return 1 - 2 * bits.astype(name)


@dataclasses.dataclass(frozen=True)
class UniformCodec(Codec):
    """Equal steps on both sides of zero: ``bits`` per element, ``2**(bits - 1) - 1`` levels a side.

    Args:
        bits: 8, 4 or 2.
        stochastic: round up with the probability that makes the result right on average, else to nearest.
        norm: "max": the largest magnitude is the top level; "l2": the Euclidean norm is.
        clip: magnitudes are cut off at so many times the root mean square; None for never.
    """

    bits: int = 8
    stochastic: bool = False
    norm: str = "max"
    clip: float | None = None

    @property
    def levels(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def code_bytes(self, elements: int) -> int:
        return -(-elements * self.bits // 8)

    def encode_piece(self, backend: Backend, piece: Array, codes: Array, random: Any) -> Any:
        top = self._top(backend, piece)
        inverse = backend.xp.where(top >= TINY, self.levels / top, top * 0)
        scratch, noise = backend.scratch(piece), backend.scratch(piece) if self.stochastic else None
        whole = backend.zeros(-(-len(scratch) // 8) * 8, "uint8")
        per_byte = 8 // self.bits
        for cut in backend.blocks(len(piece)):
            block = scratch[: cut.stop - cut.start]
            backend.xp.multiply(piece[cut], inverse, out=block)
            if noise is None:
                backend.rint(block, out=block)
            else:
                block += backend.uniform(random, noise[: len(block)])
                backend.xp.floor(block, out=block)
            backend.xp.clip(block, -self.levels, self.levels, out=block)
            block += self.levels
            backend.assign(whole[: len(block)], block)
            packed = self._packed(whole, backend)
            first, last = cut.start // per_byte, -(-cut.stop // per_byte)
            codes[first:last] = packed[: last - first]
        return top / self.levels

    def _top(self, backend: Backend, piece: Array) -> Any:
        """The magnitude of the highest level, not finite where the piece is not."""
        if self.norm == "l2":
            return backend.norm(piece)
        peak = backend.peak(piece)
        if self.clip is None:
            return peak
        limit = backend.norm(piece) * (self.clip / len(piece) ** 0.5)
        return backend.xp.minimum(peak, limit)

    def _packed(self, whole: Array, backend: Backend) -> Array:
        """Codes of one byte each squeezed together, the first in the lowest bits, by shifts of whole words."""
        if self.bits == 8:
            return whole
        out = backend.empty(len(whole) * self.bits // 8, "uint8")
        if self.bits == 4:
            words = backend.view(whole, "int16")
            backend.assign(out, (words | (words >> 4)) & 0xFF)
        else:
            words = backend.view(whole, "int32")
            backend.assign(out, (words | (words >> 6) | (words >> 12) | (words >> 18)) & 0xFF)
        return out

    def decode_piece(
        self, backend: Backend, name: str, scale: Any, codes: Array, out: Array
    ) -> None:
        per_byte = 8 // self.bits
        table = _level_table(self.bits, name)
        for cut in backend.blocks(len(out)):
            block = out[cut]
            part = codes[cut.start // per_byte : -(-cut.stop // per_byte)]
            if self.bits == 8:
                backend.assign(block, part)
                block -= self.levels
                block *= scale
            else:
                levels = backend.take(table, part).reshape(-1)
                backend.xp.multiply(levels[: len(block)], scale, out=block)


@functools.cache
def _level_table(bits: int, name: str) -> np.ndarray[Any, Any]:
    """The levels that each byte holds."""
    shifts = np.arange(0, 8, bits)
    codes = (np.arange(256)[:, None] >> shifts) & ((1 << bits) - 1)
    return (codes - ((1 << (bits - 1)) - 1)).astype(name)


@dataclasses.dataclass(frozen=True)
class Float8Codec(Codec):
    """8-bit floats (e4m3: 4 significant bits, up to 448) times a scale that puts the largest magnitude at 448."""

    TOP: ClassVar[float] = 448.0

    def code_bytes(self, elements: int) -> int:
        return elements

    def encode_piece(self, backend: Backend, piece: Array, codes: Array, random: Any) -> Any:
        peak = backend.peak(piece)
        inverse = backend.xp.where(peak >= TINY, self.TOP / peak, peak * 0)
        scratch = backend.scratch(piece)
        for cut in backend.blocks(len(piece)):
            block = backend.xp.multiply(piece[cut], inverse, out=scratch[: cut.stop - cut.start])
            backend.encode_float8(codes[cut], block)
        return peak / self.TOP

    def decode_piece(
        self, backend: Backend, name: str, scale: Any, codes: Array, out: Array
    ) -> None:
        for cut in backend.blocks(len(out)):
            backend.xp.multiply(backend.take(_float8_values(name), codes[cut]), scale, out=out[cut])


@functools.cache
def _float8_values(name: str) -> np.ndarray[Any, Any]:
    """The value of each byte of e4m3, as floats of the type ``name``."""
    import ml_dtypes  # only the 8-bit float needs it

    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(name)


@dataclasses.dataclass(frozen=True)
class PowerOfTwoCodec(Codec):
    """Sign and exponent only, nine bits: the mantissa decides with what probability the exponent is one higher.

    A carry does it: to the 31 bits of a magnitude, 23 random bits are added and the mantissa is dropped.
    """

    scaled = False

    def code_bytes(self, elements: int) -> int:
        return elements + -(-elements // 8)

    def encode_piece(self, backend: Backend, piece: Array, codes: Array, random: Any) -> Any:
        elements = len(piece)
        words = backend.view(backend.convert(piece, "float32"), "int32")
        for cut in backend.blocks(elements):
            word = words[cut]
            magnitude = backend.xp.minimum(word & 0x7FFFFFFF, backend.indices(_INFINITY))
            magnitude += backend.random_bits(random, len(word), 23)
            backend.assign(codes[cut], magnitude >> 23)
            signs = backend.pack_bits(word < 0)
            first = elements + cut.start // 8
            codes[first : first + len(signs)] = signs
        return None

    def decode_piece(
        self, backend: Backend, name: str, scale: Any, codes: Array, out: Array
    ) -> None:
        elements = len(out)
        exponents, packed = codes[:elements], codes[elements:]
        powers, signs = _power_table(name), _sign_table(name)
        for cut in backend.blocks(elements):
            block = out[cut]
            negative = backend.take(signs, packed[cut.start // 8 : -(-cut.stop // 8)]).reshape(-1)
            power = backend.take(powers, exponents[cut])
            backend.xp.multiply(power, negative[: len(block)], out=block)


_INFINITY = np.array([0x7F800000], np.int32)


@functools.cache
def _power_table(name: str) -> np.ndarray[Any, Any]:
    """The value of each exponent: 0 is zero, 255 infinity."""
    return (np.arange(256, dtype=np.int32) << 23).view(np.float32).astype(name)
