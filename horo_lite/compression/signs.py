"""One bit per element: 1/32 of float32, and a scale per gradient.

Sources: EF-signSGD, Karimireddy et al. 2019 (arXiv 1901.09847); signSGD with majority vote and Signum, Bernstein et al.
2018 (arXiv 1802.04434, 1810.05291); 1-bit SGD, Seide et al. 2014; 1-bit Adam, Tang et al. 2021 (arXiv 2102.02888).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from horo_lite.compression.base import Bucket, Exchange, Method, State
from horo_lite.compression.codecs import SignCodec
from horo_lite.compression.exchange import gathered
from horo_lite.interfaces import Group


@dataclasses.dataclass(frozen=True, repr=False)
class Sign(Method):
    """sign(x) * mean(|x|) per gradient, gathered; error feedback makes it converge where plain sign descent fails.

    Args:
        feedback: keep what was not sent for the next step.
    """

    feedback: bool = dataclasses.field(default=True, kw_only=True)

    def exchange(self, bucket: Bucket, states: Sequence[State], group: Group) -> Exchange:
        return (yield from gathered(SignCodec(), bucket, None, group))
