"""float32 to 16-bit floats and back, rounding to nearest even, into arrays that exist already.

Measured on one core, GB/s of float32 in blocks of 32 Ki elements, down and up: bfloat16 through
ml_dtypes 5 and 7, by integer arithmetic on views in numpy 2.3 and 5, in torch 6.5 and 6.6; float16
through numpy 0.6 and 1.3, in torch 7 and 6.5. So bfloat16 takes ml_dtypes, and float16 takes torch
where the process has loaded it and the array is long enough to pay for two tensor headers.

torch is given 32 Ki elements at a time: for more it starts its threads, and a cast made by the
communication thread must not take cores from back-propagation.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from horo_lite.interfaces import Array

_TORCH_PAYS_ELEMENTS = 2048
_TORCH_THREADS_ELEMENTS = 1 << 15
_FLOAT16 = np.dtype(np.float16)


def cast(out: Array, source: Array) -> None:
    """out[:] = source, converted to out's type; both are flat numpy arrays.

    Values beyond a 16-bit float's range become infinite, NaN stays NaN. numpy warns of the former:
    call this under ``numpy.errstate(all="ignore")`` where that is expected.
    """
    torch: Any = sys.modules.get("torch")
    if (
        torch is not None
        and len(out) >= _TORCH_PAYS_ELEMENTS
        and (out.dtype is _FLOAT16 or source.dtype is _FLOAT16)
        and source.flags.writeable
    ):
        for start in range(0, len(out), _TORCH_THREADS_ELEMENTS):
            block = slice(start, start + _TORCH_THREADS_ELEMENTS)
            torch.from_numpy(out[block]).copy_(torch.from_numpy(source[block]))
    else:
        np.copyto(out, source, casting="unsafe")
