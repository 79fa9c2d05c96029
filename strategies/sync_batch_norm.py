"""Batch norm with statistics over the batches of all processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_private import as_sync_batch_norm
from .differentiable_collectives import all_reduce

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
#: The changed layers, each with the attributes that were set on it.
Changed = list[tuple[nn.Module, dict[str, Any]]]


class LayerSync(ABC):
    """A plugin that makes layers such as batch norms use the batches of all processes during a multi-process fit."""

    @abstractmethod
    def apply(self, model: nn.Module) -> nn.Module:
        """Change the model's layers in place and return the model. Called before the weights are placed or sharded."""

    @abstractmethod
    def revert(self, model: nn.Module) -> nn.Module:
        """Undo :meth:`apply`, in place, at the end of the fit, and return the model."""


class TorchSyncBatchNorm(LayerSync):
    """A plugin with the same effect as ``Trainer(sync_batchnorm=True)``."""

    def __init__(self) -> None:
        self._replaced: dict[str, nn.Module] = {}

    def apply(self, model: nn.Module) -> nn.Module:
        """Return the model with synchronized batch norms."""
        self._replaced = {name: layer for name, layer in model.named_modules() if type(layer) in KINDS}
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)

    def revert(self, model: nn.Module) -> nn.Module:
        """Return the model with its original batch norms, which share the synchronized ones' weights and statistics."""
        for name, layer in self._replaced.items():
            model.set_submodule(name, layer)
        return model


def trained(module: nn.Module) -> list[nn.Module]:
    """Return the batch norms in a module that normalize with the statistics of each batch."""
    return [layer for layer in module.modules() if type(layer) in KINDS and layer.training]


def synchronize(module: nn.Module, device: torch.device) -> Changed:
    """Make every batch norm in a module use the batches of all processes. Pass the result to :func:`release`.

    Only the forward of each layer is replaced, so the layer keeps its class, its hooks, and its position in the module.
    """
    changed: Changed = []
    for layer in module.modules():
        if type(layer) in KINDS and "forward" not in vars(layer):
            on_cpu = device.type == "cpu"
            changed.append((layer, {"forward": partial(_over_all, layer)} if on_cpu else as_sync_batch_norm(layer)))
            vars(layer).update(changed[-1][1])
    return changed


def release(changed: Changed) -> None:
    """Restore the layers' own forward methods."""
    for layer, attributes in changed:
        for name, value in attributes.items():
            if vars(layer).get(name) is value:
                del vars(layer)[name]


def _over_all(layer: Any, input: Tensor) -> Tensor:
    """Normalize with the mean and variance over the batches of all processes; gradients flow through both.

    ``torch.nn.SyncBatchNorm`` does the same, but only on GPUs. The variance is computed around the mean, which takes
    two small reductions but avoids the cancellation in E[x^2] - E[x]^2.
    """
    if not layer.training and layer.running_mean is not None:
        return type(layer).forward(layer, input)
    over = [dim for dim in range(input.dim()) if dim != 1]
    shape = [1, -1, *([1] * (input.dim() - 2))]
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    count = torch.tensor(float(x.numel() // x.shape[1]), dtype=x.dtype)
    total = all_reduce(torch.cat([x.sum(over), count.reshape(1)]))
    everywhere = total[-1].detach()
    mean = total[:-1] / everywhere
    centered = x - mean.view(shape)
    variance = all_reduce(centered.square().sum(over)) / everywhere
    if layer.training and layer.running_mean is not None and layer.running_var is not None:
        _remember(layer, mean.detach(), variance.detach() * everywhere / (everywhere - 1))
    normal = centered * torch.rsqrt(variance + layer.eps).view(shape)
    if layer.weight is not None:
        normal = normal * layer.weight.view(shape) + layer.bias.view(shape)
    return normal.to(input.dtype)


def _remember(layer: Any, mean: Tensor, variance: Tensor) -> None:
    seen = layer.num_batches_tracked
    if seen is not None:
        seen.add_(1)
    factor = layer.momentum if layer.momentum is not None else 1.0 / float(seen) if seen is not None else 0.0
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), factor)
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), factor)
