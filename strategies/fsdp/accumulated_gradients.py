"""Gradients that FSDP2 has accumulated and not yet reduced: saved, and put back where torch looks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...torch_private import fsdp_parameters, whole_parameter
from .. import sharded_tensors


def gather(root: nn.Module, module: nn.Module) -> dict[str, Any] | None:
    """What of each parameter's gradient this process has, on the CPU, by the parameter's name.

    ``whole``: accumulated here and reduced with nobody; ``part``: this process's part of a gradient that was reduced.
    None if a whole one lies in parts itself, over another axis of the mesh.
    """
    names = _names(module)
    found: dict[str, Any] = {}
    for one in fsdp_parameters(root):
        whole, part = _accumulated(one), one.sharded_param.grad
        if isinstance(whole, DTensor):
            return None
        if whole is not None or part is not None:
            found[names[id(one.sharded_param)]] = {
                "whole": None if whole is None else whole.detach().cpu(),
                "part": None if part is None else sharded_tensors.local_parts([part])[0].detach().cpu(),
            }
    return found


def put_back(root: nn.Module, module: nn.Module, state: Mapping[str, Any], device: torch.device) -> None:
    """Take back :func:`gather`. Every process must call: what is accumulated lies with whole parameters."""
    names = _names(module)
    parts = [part for part in root.modules() if isinstance(part, FSDPModule)]
    for part in parts:  # a whole parameter is made when it is first put together
        part.unshard()
    for part in parts:
        part.reshard()
    for one in fsdp_parameters(root):
        kept = state.get(names[id(one.sharded_param)])
        if kept is None:
            continue
        if kept["part"] is not None:
            own = one.sharded_param
            local, mesh, placements = kept["part"].to(own.device), own.device_mesh, own.placements
            own.grad = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=own.shape, stride=own.stride()
            )
        if kept["whole"] is not None:
            whole = kept["whole"].to(device)
            parameter = whole_parameter(one)
            if parameter is not None and whole.dtype == parameter.dtype:
                parameter.grad = whole
            else:
                one.unsharded_accumulated_grad = whole


def _names(module: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _accumulated(one: Any) -> Tensor | None:
    if one.unsharded_accumulated_grad is not None:
        return one.unsharded_accumulated_grad
    parameter = whole_parameter(one)
    return None if parameter is None else parameter.grad
