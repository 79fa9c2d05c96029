"""Tensors that lie in parts on several processes: made whole, cut, measured and clipped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from ..torch_private import multiply_each_, norm_of_each


def whole(value: Any, keep: bool, known: dict[int, Tensor] | None = None) -> Any:
    """A state with each tensor whole, on the CPU. Every process must call; those that do not ``keep`` get no values.

    Args:
        value: a dict or list of (dicts or lists of) tensors and other things.
        keep: False gives tensors without memory (on the meta device) in the place of those that were in parts.
        known: what was made whole already, by the id of the tensor in parts; one tensor at two places stays one.
    """
    known = {} if known is None else known
    if isinstance(value, Mapping):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return kind((key, whole(inner, keep, known)) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(whole(inner, keep, known) for inner in value)
    if isinstance(value, DTensor):
        if id(value) not in known:
            full = value.full_tensor().detach()
            known[id(value)] = full.cpu() if keep else full.to("meta")
        return known[id(value)]
    return value.detach().cpu() if isinstance(value, Tensor) else value


def detached(value: Any, known: dict[int, Tensor] | None = None) -> Any:
    """A state with every tensor as data alone, without a graph; one tensor at two places stays one."""
    known = {} if known is None else known
    if isinstance(value, Mapping):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return kind((key, detached(inner, known)) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(detached(inner, known) for inner in value)
    return known.setdefault(id(value), value.detach()) if isinstance(value, Tensor) else value


def cut(full: Tensor, like: DTensor) -> DTensor:
    """This process's part of a tensor, laid out as ``like``.

    Nothing is sent for a whole tensor, which every process must have, and for one that is laid out so already; one that
    lies in other parts is put together first, and every process must call.
    """
    if isinstance(full, DTensor):
        if full.device_mesh == like.device_mesh and full.placements == like.placements:
            return full
        full = full.full_tensor()
    full = full if like.is_meta else full.to(like.to_local().device)
    spread = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    local = spread.to_local().clone()  # a part that shares memory would keep the whole alive
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def without_memory(tensor: Tensor) -> Tensor:
    """One of the same shape and layout on the meta device."""
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device="meta")
    local = torch.empty_like(tensor.to_local(), device="meta")
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def replicate(full: Tensor, like: DTensor) -> DTensor:
    """A tensor that every process holds whole, on the mesh of ``like``."""
    full = full.full_tensor() if isinstance(full, DTensor) else full
    full = full.to(like.to_local().device)
    return DTensor.from_local(full, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def settle(parameters: Iterable[Tensor]) -> None:
    """Give every gradient its parameter's layout: some layers leave a sum over processes for whoever reads it."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What of each tensor lies in this process."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def total_norm(tensors: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm over all tensors and all processes: float32 or wider, shape (), the same value everywhere.

    One reduction for each way of laying out that occurs. Every process must call, with the same tensors.
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


def _power_sum(locals_: list[Tensor], norm_type: float) -> Tensor:
    """The sum of the elements' powers (their largest size for the infinity norm), shape ()."""
    filled = [tensor for tensor in locals_ if tensor.numel()]
    if not filled:
        return torch.zeros((), device=locals_[0].device, dtype=_wide(locals_[0].dtype))
    norms = torch.stack([norm.to(filled[0].device) for norm in _norms(filled, norm_type)])
    return norms.max() if norm_type == torch.inf else norms.pow(norm_type).sum()


def _norms(tensors: list[Tensor], norm_type: float) -> list[Tensor]:
    return norm_of_each(tensors, norm_type, dtype=_wide(tensors[0].dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def clip_by_norm(grads: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Scale gradients so that their norm over all processes is at most ``max_norm``; return the norm before."""
    total = total_norm(grads, norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    multiply(grads, factor)
    return total


def multiply(tensors: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply tensors in place by a number or a scalar tensor that every process has."""
    devices: dict[torch.device, list[Tensor]] = {}
    for part in local_parts(tensors):
        devices.setdefault(part.device, []).append(part)
    for device, parts in devices.items():
        here = factor.to(device) if isinstance(factor, Tensor) else factor
        multiply_each_(parts, here)


def cut_if_fits(value: Any, own: Any) -> Any:
    """This process's part of a whole tensor; what does not fit stays, for ``load_state_dict`` to complain."""
    fits = isinstance(own, DTensor) and isinstance(value, Tensor) and value.shape == own.shape
    return cut(value, own) if fits else value


def cut_like_parameter(value: Any, parameter: Tensor | None) -> Any:
    """This process's part of an optimizer's tensor for a parameter; what is no tensor of a split one stays."""
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor):
        return value
    if value.shape == parameter.shape:
        return cut(value, parameter)
    return value if value.dim() == 0 else replicate(value, parameter)
