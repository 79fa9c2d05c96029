"""Differentiable collectives for any backend.

Torch's own functions (torch.distributed.nn.functional) are deprecated, and their replacements are not differentiable.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _AllReduce.apply(gradients[0], ctx.group), None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        own = tensor.detach().contiguous()
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, own, group=group)
        return torch.stack(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return all_reduce(gradients[0], ctx.group)[dist.get_rank(ctx.group)], None


def all_reduce(tensor: Tensor, group: Any = None) -> Tensor:
    """Sum a tensor across the processes of ``group``; None means all processes. Gradients are summed the same way."""
    return _AllReduce.apply(tensor, group)  # type: ignore[return-value]


def all_gather(tensor: Tensor, group: Any = None) -> Tensor:
    """Stack the tensors of a group's processes, giving shape (processes, *tensor.shape).

    Gradients flow back to the process that each tensor came from.
    """
    return _AllGather.apply(tensor, group)  # type: ignore[return-value]
