"""Fewer bits per element: 8, 4 or 2, and a scale per gradient.

With 8 bits, encoding the mean anew costs little, so from three ranks on these methods take the schedule that sends
2 (N-1)/N payloads (``exchange.scattered``). With fewer bits every payload is gathered, (N-1) of them: the second
rounding would be as coarse as the first, and not averaged over ranks.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from horo_lite.compression.base import check_between
from horo_lite.compression.codecs import Codec, Float8Codec, PowerOfTwoCodec, UniformCodec
from horo_lite.compression.exchange import Coded, Stochastic
from horo_lite.errors import ArgumentError


@dataclasses.dataclass(frozen=True, repr=False)
class Int8(Coded):
    """round(127 x / max|x|), to nearest: deterministic, an error of at most max|x| / 254 per element.

    Dettmers 2015 (arXiv 1511.04561) and common practice.
    """

    def recodes(self) -> bool:
        return True

    def codec(self) -> Codec:
        return UniformCodec(8)


@dataclasses.dataclass(frozen=True, repr=False)
class Float8(Coded):
    """8-bit floats (e4m3) of 448 x / max|x|: 4 significant bits for values within 2**-15 of the largest.

    Micikevicius et al. 2022 (arXiv 2209.05433).
    """

    def recodes(self) -> bool:
        return True

    def codec(self) -> Codec:
        return Float8Codec()


@dataclasses.dataclass(frozen=True, repr=False)
class QSGD(Stochastic):
    """Stochastic rounding to ``2**(bits-1) - 1`` levels a side, unbiased. Alistarh et al. 2017 (arXiv 1610.02132).

    Args:
        bits: 8, 4 or 2 per element.
        norm: what the top level stands for: "max", the largest magnitude (as in the paper's experiments), or "l2",
            the Euclidean norm (as in its analysis; on long gradients nearly all becomes zero).
    """

    bits: int = 8
    norm: Literal["max", "l2"] = "max"

    def __post_init__(self) -> None:
        if self.bits not in (8, 4, 2):
            raise ArgumentError(
                f"bits is {self.bits!r}; expected 8, 4 or 2, as in Compression.qsgd(bits=4)"
            )
        if self.norm not in ("max", "l2"):
            raise ArgumentError(f"norm is {self.norm!r}; expected 'max' or 'l2'")

    def codec(self) -> Codec:
        return UniformCodec(self.bits, stochastic=True, norm=self.norm)

    def recodes(self) -> bool:
        return self.bits == 8


@dataclasses.dataclass(frozen=True, repr=False)
class TernGrad(Stochastic):
    """Zero or plus or minus the largest magnitude, at random, 2 bits. Wen et al. 2017 (arXiv 1705.07878).

    Args:
        clip: magnitudes are cut off at so many times the root mean square first, as in the paper: less variance for
            a little bias. None for none.
    """

    clip: float | None = 2.5

    def __post_init__(self) -> None:
        if self.clip is not None:
            check_between("clip", self.clip, 0, float("inf"), "Compression.terngrad(clip=2.5)")

    def codec(self) -> Codec:
        return UniformCodec(2, stochastic=True, clip=self.clip)


@dataclasses.dataclass(frozen=True, repr=False)
class Natural(Stochastic):
    """Stochastic rounding to powers of two: sign and exponent, 9 bits, variance at most 1/8 of the value squared.

    Horvath et al. 2019 (arXiv 1905.10988). Needs no scale; rounding up from above 2**127 gives infinity.
    """

    def recodes(self) -> bool:
        return True

    def codec(self) -> Codec:
        return PowerOfTwoCodec()
