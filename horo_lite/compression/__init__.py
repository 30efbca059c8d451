"""What goes on the wire in place of a bucket's gradients, and how it is read back: pure maths.

Third stage of the data path. ``Compression`` lists the methods; ``resolve`` makes a ``Compressor``
of whatever a user passes; the engine drives it by answering its requests. docs/compression.md has
each method's formula, source and cost.
"""

from __future__ import annotations

from horo_lite.compression import wrappers
from horo_lite.compression.auto import Auto
from horo_lite.compression.base import RANK_OWN, STATE_KEYS, Frozen, Method
from horo_lite.compression.casts import BFloat16, Cast, Float16, NoCompression
from horo_lite.compression.lowrank import PowerSGD
from horo_lite.compression.quantize import QSGD, Float8, Int8, Natural, TernGrad
from horo_lite.compression.resolve import as_compressor, is_compression, resolve, with_feedback
from horo_lite.compression.signs import OneBit, Sign, Signum
from horo_lite.compression.sparse import DGC, RandomK, Threshold, TopK
from horo_lite.interfaces import CompressorRequest, GatherRequest, SumRequest

__all__ = [
    "RANK_OWN",
    "STATE_KEYS",
    "Cast",
    "Compression",
    "Frozen",
    "Method",
    "as_compressor",
    "is_compression",
    "payload_bytes",
    "resolve",
]


class Compression:
    """The methods by name, each a class.

    ``Compression.topk`` takes its defaults, ``Compression.topk(0.001)`` yours.
    """

    none = NoCompression
    fp16 = Float16
    bf16 = BFloat16
    fp8 = Float8
    int8 = Int8
    qsgd = QSGD
    terngrad = TernGrad
    natural = Natural
    sign = Sign
    signum = Signum
    onebit = OneBit
    topk = TopK
    randomk = RandomK
    threshold = Threshold
    dgc = DGC
    powersgd = PowerSGD
    auto = Auto

    with_feedback = staticmethod(with_feedback)
    min_size = staticmethod(wrappers.min_size)
    per_layer = staticmethod(wrappers.per_layer)
    warmup = staticmethod(wrappers.warmup)


def payload_bytes(request: CompressorRequest) -> int:
    """The bytes that a request puts up for sending; what is really sent depends on the schedule and the ranks."""
    if isinstance(request, SumRequest):
        return int(request.array.nbytes)
    if isinstance(request, GatherRequest):
        return int(request.payload.nbytes)
    return sum(int(payload.nbytes) for payload in request.payloads)
