"""Gather, split, measure and clip tensors that are sharded across processes (DTensors)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from ..torch_private import multiply_each_, norm_of_each


@torch.inference_mode(False)  # torch 2.11 cannot gather a parameter in inference mode
@torch.no_grad()
def whole(state: Any, keep: bool) -> Any:
    """Return a state (nested dicts and lists) with full tensors on the CPU. Every process must call this.

    References to the same tensor stay references to one tensor. If ``keep`` is False, sharded tensors are returned on
    the meta device, without memory.
    """
    known: dict[int, Tensor] = {}

    def gathered(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value.detach().cpu() if isinstance(value, Tensor) else value
        if id(value) not in known:
            full = value.full_tensor()
            known[id(value)] = full.cpu() if keep else full.to("meta")
        return known[id(value)]

    return _mapped(state, gathered)


def detached(state: Any) -> Any:
    """Return a state with detached tensors; references to the same tensor stay references to one tensor."""
    known: dict[int, Tensor] = {}
    return _mapped(state, lambda v: known.setdefault(id(v), v.detach()) if isinstance(v, Tensor) else v)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return kind((key, _mapped(inner, change)) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(inner, change) for inner in value)
    return change(value)


def from_part(part: Tensor, like: DTensor) -> DTensor:
    """Return a DTensor with the layout of ``like`` and with ``part`` as this process's shard."""
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def cut(full: Tensor, like: DTensor) -> DTensor:
    """Shard a tensor with the layout of ``like``.

    Every process must call this, with either the full tensor, in which case nothing is sent, or a DTensor. A DTensor
    with a different layout is gathered first.
    """
    if isinstance(full, DTensor):
        if full.device_mesh == like.device_mesh and full.placements == like.placements:
            return full
        full = full.full_tensor()
    full = full if like.is_meta else full.to(like.to_local().device)
    split = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    return from_part(split.to_local().clone(), split)  # a view would keep the full tensor alive


def cut_if_fits(value: Any, own: Any) -> Any:
    """Shard a tensor with the layout of ``own`` if the two have the same shape.

    If ``own`` is a plain tensor, a sharded tensor is gathered instead. Other values are returned unchanged, so that
    ``load_state_dict`` reports them.
    """
    if isinstance(value, DTensor) and isinstance(own, Tensor) and not isinstance(own, DTensor):
        return value.full_tensor()
    fits = isinstance(own, DTensor) and isinstance(value, Tensor) and value.shape == own.shape
    return cut(value, own) if fits else value


def cut_like_parameter(value: Any, parameter: Tensor | None) -> Any:
    """Shard, replicate or gather an optimizer state tensor to match its parameter; return other values unchanged."""
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if value.shape == parameter.shape:
        return cut(value, parameter)
    if value.dim() == 0:
        return value
    mesh, full = parameter.device_mesh, value.full_tensor() if isinstance(value, DTensor) else value
    return DTensor.from_local(full.to(parameter.to_local().device), mesh, [Replicate()] * mesh.ndim, run_check=False)


def without_memory(tensor: Tensor) -> Tensor:
    """Return a tensor on the meta device that has the same shape and layout as another one."""
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device="meta")
    return from_part(torch.empty_like(tensor.to_local(), device="meta"), tensor)


def settle(parameters: Iterable[Tensor]) -> None:
    """Convert each gradient to its parameter's layout. Some layers leave gradients as pending sums across processes."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this process's shard of each tensor."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def total_norm(tensors: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm over all tensors and processes, shape (), in float32 or wider; it is the same on every process.

    This runs one reduction per layout. Every process must call this with the same tensors.
    """
    layouts: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        layout = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        layouts.setdefault(layout, []).append(tensor)
    totals = []
    for layout, members in layouts.items():
        total = _power_sum(local_parts(members), norm_type)
        if layout is not None:
            mesh, placements = layout
            for axis, placement in enumerate(placements):
                if not placement.is_replicate():
                    op = dist.ReduceOp.MAX if norm_type == torch.inf else dist.ReduceOp.SUM
                    dist.all_reduce(total, op, group=mesh.get_group(axis))
        totals.append(total)
    if not totals:
        return torch.tensor(0.0)
    device = totals[0].device
    joined = torch.stack([total.to(device) for total in totals])
    return joined.max() if norm_type == torch.inf else joined.sum() ** (1.0 / norm_type)


def _power_sum(parts: list[Tensor], norm_type: float) -> Tensor:
    """Return the sum of ``|x| ** norm_type`` over all elements, shape (); for the infinity norm, the maximum."""
    filled = [part for part in parts if part.numel()]
    dtype = torch.float64 if (filled or parts)[0].dtype is torch.float64 else torch.float32
    if not filled:
        return torch.zeros((), device=parts[0].device, dtype=dtype)
    norms = torch.stack([norm.to(filled[0].device) for norm in norm_of_each(filled, norm_type, dtype=dtype)])
    return norms.max() if norm_type == torch.inf else norms.pow(norm_type).sum()


def clip_by_norm(grads: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Scale gradients so that their norm across all processes is at most ``max_norm``; return the original norm."""
    total = total_norm(grads, norm_type)
    multiply(grads, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


def multiply(tensors: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply tensors in place by a number, or by a scalar tensor that is the same on every process."""
    devices: dict[torch.device, list[Tensor]] = {}
    for part in local_parts(tensors):
        devices.setdefault(part.device, []).append(part)
    for device, parts in devices.items():
        multiply_each_(parts, factor.to(device) if isinstance(factor, Tensor) else factor)
