"""Batch normalisation over the batches of all ranks, on any device.

Forward: one gather of each rank's count, mean and sum of squared deviations per channel, combined exactly (Chan,
Golub and LeVeque 1979). Backward: one all-reduce of two sums per channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from horo_lite import functions
from horo_lite.functions import Sum
from horo_lite.process_sets import ProcessSet, global_process_set


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm`` of any number of dimensions, whose statistics are those of all ranks' batches together.

    Batches may differ in size. ``eval()`` communicates nothing.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as ``torch.nn.BatchNorm2d`` takes them.
        process_set: the ranks that normalise together.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise; in training collectively."""
        self._check_input_dim(input)
        if not self.training:
            return torch.nn.functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, self.running_mean is None,
                0.0, self.eps,
            )
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps, self.process_set)
        if self.running_mean is not None:
            self._track(mean, variance * (count / (count - 1).clamp(min=1)))
        return output

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, unbiased_variance: torch.Tensor) -> None:
        self.num_batches_tracked.add_(1)  # type: ignore[union-attr, operator]
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum  # type: ignore[arg-type]
        for running, current in ((self.running_mean, mean), (self.running_var, unbiased_variance)):
            running.lerp_(current.to(running.dtype), factor)  # type: ignore[union-attr]

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Replace every ``BatchNorm*d`` in a model by this, parameters and statistics kept.

        Returns:
            the model, or its replacement where the model itself is one.
        """
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            converted = cls(
                module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats,
                process_set=process_set,
            )
            if module.affine:
                converted.weight, converted.bias = module.weight, module.bias
            converted.running_mean, converted.running_var = module.running_mean, module.running_var
            converted.num_batches_tracked = module.num_batches_tracked
            converted.training = module.training
            return converted
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_set))
        return module


def convert_sync_batchnorm(
    module: torch.nn.Module, process_set: ProcessSet = global_process_set
) -> torch.nn.Module:
    """See ``SyncBatchNorm.convert_sync_batchnorm``."""
    return SyncBatchNorm.convert_sync_batchnorm(module, process_set)


def _channels(tensor: torch.Tensor) -> torch.Tensor:
    """(channels, everything else), in float32 or wider."""
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    return wide.transpose(0, 1).reshape(tensor.shape[1], -1)


def _along(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One value per channel, shaped to broadcast over ``like``."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _combine(rows: torch.Tensor, channels: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, biased variance and count from each rank's (count, means, sums of squared deviations)."""
    counts, means, deviations = rows[:, :1], rows[:, 1 : channels + 1], rows[:, channels + 1 :]
    count = counts.sum().clamp(min=1)
    mean = (counts * means).sum(0) / count
    squares = deviations.sum(0) + (counts * (means - mean).square()).sum(0)
    return mean, squares / count, count


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, input: torch.Tensor, weight: Any, bias: Any, eps: float, process_set: ProcessSet
    ) -> tuple[torch.Tensor, ...]:
        values = _channels(input)
        count = values.shape[1]
        own_mean = values.mean(1) if count else values.sum(1)
        own_squares = (values - own_mean[:, None]).square().sum(1)
        row = torch.cat([own_mean.new_tensor([count]), own_mean, own_squares])
        rows = functions.allgather(row[None], None, process_set)
        mean, variance, total = _combine(rows, len(own_mean))
        scale = (variance + eps).rsqrt()
        normalized = (input.to(mean.dtype) - _along(mean, input)) * _along(scale, input)
        ctx.save_for_backward(input, weight, mean, scale, total)
        ctx.process_set = process_set
        output = normalized if weight is None else normalized * _along(weight, input) + _along(bias, input)
        ctx.mark_non_differentiable(mean, variance, total)
        return output.to(input.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        input, weight, mean, scale, total = ctx.saved_tensors
        gradient = gradients[0].to(mean.dtype)
        normalized = (input.to(mean.dtype) - _along(mean, input)) * _along(scale, input)
        sums = torch.cat([_channels(gradient).sum(1), _channels(gradient * normalized).sum(1)])
        own_bias, own_weight = sums.clone().chunk(2)
        mean_gradient, mean_product = (
            functions.allreduce(sums, op=Sum, process_set=ctx.process_set) / total
        ).chunk(2)
        through = gradient - _along(mean_gradient, input) - normalized * _along(mean_product, input)
        factor = scale if weight is None else scale * weight
        to_input = (through * _along(factor, input)).to(input.dtype)
        if weight is None:
            return to_input, None, None, None, None
        return to_input, own_weight.to(weight.dtype), own_bias.to(weight.dtype), None, None
