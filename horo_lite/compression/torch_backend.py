"""The operations of compression on the tensors of one device, by torch.

An array is taken whole, one launch for each operation. torch is found through ``sys.modules``: who passes a tensor has
imported it. Nothing here moves a tensor off its device. In host memory numpy does a few things faster on the same
bytes, since it can take them in blocks that stay in cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from horo_lite.compression.numpy_backend import NumpyBackend
from horo_lite.interfaces import Array


class TorchBackend:
    """Flat torch tensors of one device. Operation by operation the same as ``NumpyBackend``."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.xp: Any = sys.modules["torch"]
        self.rint = self.xp.round

    def blocks(self, elements: int) -> Iterator[slice]:
        if elements:
            yield slice(0, elements)

    def scratch(self, like: Array) -> Array:
        return self.xp.empty_like(like)

    def empty(self, elements: int, name: str) -> Array:
        return self.xp.empty(elements, dtype=getattr(self.xp, name), device=self.device)

    def zeros(self, elements: int, name: str) -> Array:
        return self.xp.zeros(elements, dtype=getattr(self.xp, name), device=self.device)

    def view(self, array: Array, name: str) -> Array:
        kind = getattr(self.xp, name)
        if array.storage_offset() * array.itemsize % kind.itemsize:
            array = (
                array.clone()
            )  # a received payload that starts at an odd byte; torch views aligned memory only
        return array.view(kind)

    def convert(self, array: Array, name: str) -> Array:
        return array.to(getattr(self.xp, name))

    def assign(self, out: Array, source: Array) -> None:
        out.copy_(source)

    def copy(self, array: Array) -> Array:
        return array.clone()

    def join(self, arrays: Sequence[Array]) -> Array:
        return arrays[0] if len(arrays) == 1 else self.xp.cat(list(arrays))

    def generator(self, *words: int) -> Any:
        seed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) >> 1
        return self.xp.Generator(self.device).manual_seed(seed)

    def uniform(self, generator: Any, out: Array) -> Array:
        return out.uniform_(generator=generator)

    def random_bits(self, generator: Any, elements: int, bits: int) -> Array:
        out = self.empty(elements, "int32")
        return out.random_(0, 1 << bits, generator=generator)

    def pack_bits(self, bits: Array) -> Array:
        padding = -len(bits) % 8
        padded = self.xp.nn.functional.pad(bits.to(self.xp.uint8), (0, padding)).view(-1, 8)
        return (padded * self._constant(1 << np.arange(8), "uint8")).sum(1, dtype=self.xp.uint8)

    def take(self, table: np.ndarray, codes: Array) -> Array:
        return self._constant(table, table.dtype.name)[codes.to(self.xp.int64)]

    def encode_float8(self, codes: Array, values: Array) -> None:
        codes.copy_(values.to(self.xp.float8_e4m3fn).view(self.xp.uint8))

    def stack(self, scalars: Sequence[Any], name: str) -> Array:
        kind = getattr(self.xp, name)
        return self.xp.stack(
            [self.xp.as_tensor(s, dtype=kind, device=self.device) for s in scalars]
        )

    def peak(self, array: Array) -> Any:
        return array.abs().max()

    def mean_abs(self, array: Array) -> Any:
        return array.abs().mean(dtype=self.xp.float64).to(array.dtype)

    def norm(self, array: Array) -> Any:
        norm = self.xp.linalg.vector_norm(array, dtype=self.xp.float64)
        largest = self.xp.finfo(array.dtype).max
        return self.xp.where(self.xp.isfinite(array.abs().max()), norm.clamp(max=largest), norm).to(array.dtype)

    def finite(self, array: Array) -> bool:
        return bool(self.xp.isfinite(array).all())

    def largest(self, array: Array, count: int) -> Array:
        return self.xp.topk(array.abs(), count, sorted=False).indices.sort().values

    def where_true(self, condition: Array) -> Array:
        return condition.nonzero().view(-1)

    def indices(self, values: np.ndarray) -> Array:
        return self.xp.from_numpy(values).to(self.device)

    def to_host(self, array: Array) -> np.ndarray:
        return array.cpu().numpy()

    def orthonormal(self, matrix: Array) -> Array:
        basis = self.xp.linalg.qr(self.xp.nan_to_num(matrix)).Q
        return self.xp.where(self.xp.isfinite(matrix).all(), basis, self.xp.nan)

    def product(self, out: Array, left: Array, right: Array) -> None:
        self.xp.matmul(left, right, out=out)

    def product_of_sum(self, out: Array, a: Array, b: Array, right: Array) -> Array:
        return self.xp.add(a, b, out=out) @ right

    def subtract_product(self, out: Array, left: Array, right: Array) -> None:
        out.addmm_(left, right, alpha=-1)

    def normal(self, generator: Any, elements: int, name: str) -> Array:
        return self.empty(elements, name).normal_(generator=generator)

    def _constant(self, values: np.ndarray, name: str) -> Array:
        return self.xp.as_tensor(values, device=self.device).to(getattr(self.xp, name))


class HostTensorBackend(TorchBackend):
    """Flat torch tensors in host memory: large memory and what passes over it more than once, by numpy."""

    _numpy = NumpyBackend()

    def empty(self, elements: int, name: str) -> Array:
        kind = getattr(self.xp, name)
        octets = self._tensor(self._numpy.empty(elements * kind.itemsize, "uint8"))
        return octets.view(kind) if elements else super().empty(0, name)

    def zeros(self, elements: int, name: str) -> Array:
        return self.empty(elements, name).zero_()

    def largest(self, array: Array, count: int) -> Array:
        return self._tensor(self._numpy.largest(array.numpy(), count))

    def product(self, out: Array, left: Array, right: Array) -> None:
        self._numpy.product(out.numpy(), left.numpy(), right.numpy())

    def product_of_sum(self, out: Array, a: Array, b: Array, right: Array) -> Array:
        return self._tensor(
            self._numpy.product_of_sum(out.numpy(), a.numpy(), b.numpy(), right.numpy())
        )

    def subtract_product(self, out: Array, left: Array, right: Array) -> None:
        self._numpy.subtract_product(out.numpy(), left.numpy(), right.numpy())

    def _tensor(self, array: np.ndarray) -> Array:
        return self.xp.from_numpy(array)
