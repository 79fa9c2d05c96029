"""Batch norm over the batches of all processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..torch_private import BatchNormOfAnyShape
from .differentiable_collectives import all_reduce

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class AcrossProcesses(BatchNormOfAnyShape):
    """Batch norm whose mean and variance are those of all processes' batches together; gradients go through both.

    ``torch.nn.SyncBatchNorm`` does the same on GPUs only, so this one serves the CPU. The mean is taken first, the
    variance around it then: two small reductions a layer, without the cancellation of E[x^2] - E[x]^2.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        over = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1, *([1] * (input.dim() - 2))]
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        count = torch.tensor(float(x.numel() // x.shape[1]), dtype=x.dtype)
        total = all_reduce(torch.cat([x.sum(over), count.reshape(1)]))
        everywhere = total[-1].detach()
        mean = total[:-1] / everywhere
        centered = x - mean.view(shape)
        variance = all_reduce(centered.square().sum(over)) / everywhere
        if self.training and self.running_mean is not None and self.running_var is not None:
            self._remember(mean.detach(), variance.detach() * everywhere / (everywhere - 1))
        normal = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)

    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        seen = self.num_batches_tracked
        factor = self.momentum if self.momentum is not None else 1.0 / float(seen) if seen is not None else 0.0
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)  # type: ignore[union-attr]
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor)  # type: ignore[union-attr]


def trained(module: nn.Module) -> list[nn.Module]:
    """The batch norms of a module whose statistics come from the batch."""
    return [layer for layer in module.modules() if type(layer) in KINDS and layer.training]


def synchronize(module: nn.Module, device: torch.device) -> list[tuple[nn.Module, type]]:
    """Make every batch norm of a module take in all processes' batches; returns what :func:`release` takes.

    A layer changes its class and stays the object it is: parameters, buffers, names and hooks are the same.
    """
    changed: list[tuple[nn.Module, type]] = []
    for layer in module.modules():
        if type(layer) in KINDS:
            changed.append((layer, type(layer)))
            layer.__class__ = AcrossProcesses if device.type == "cpu" else nn.SyncBatchNorm
            layer.process_group = dist.group.WORLD  # type: ignore[assignment]
    return changed


def release(changed: list[tuple[nn.Module, type]]) -> None:
    """Give the layers their own class back."""
    for layer, kind in changed:
        layer.__class__ = kind
        del layer.process_group
