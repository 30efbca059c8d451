"""``horovod.torch.compression``'s name for what the framework-free package has."""

from __future__ import annotations

from horo_lite.compression import Compression

__all__ = ["Compression"]
