"""``hvd.elastic`` for torch: ``@hvd.elastic.run`` and ``hvd.elastic.TorchState``."""

from __future__ import annotations

from horo_lite.elastic import ObjectState, State, run
from horo_lite.torch.elastic.sampler import ElasticSampler
from horo_lite.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
