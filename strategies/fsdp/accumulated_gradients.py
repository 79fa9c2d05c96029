"""Save and restore gradients that FSDP2 has accumulated but not reduced yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...torch_private import fsdp_parameters, set_waiting_gradient, waiting_gradient
from .. import sharded_tensors


def gather(root: nn.Module, module: nn.Module) -> dict[str, Any] | None:
    """Return this process's gradients on the CPU, keyed by parameter name.

    For each parameter, ``whole`` is an unsharded gradient that was accumulated but not reduced, and ``part`` is this
    process's shard of a reduced gradient; either may be None. Parameters that FSDP ignores only have ``whole``. Returns
    None if an unsharded gradient is itself split along another mesh dimension.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[str, Any] = {
        name: {"whole": parameter.grad.detach().cpu(), "part": None}
        for name, parameter in module.named_parameters()
        if not isinstance(parameter, DTensor) and parameter.grad is not None
    }
    for one in fsdp_parameters(root):
        whole, part = waiting_gradient(one), one.sharded_param.grad
        if isinstance(whole, DTensor):
            return None
        if whole is not None or part is not None:
            found[names[id(one.sharded_param)]] = {
                "whole": None if whole is None else whole.detach().cpu(),
                "part": None if part is None else sharded_tensors.local_parts([part])[0].detach().cpu(),
            }
    return found


def put_back(root: nn.Module, module: nn.Module, state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the gradients that :func:`gather` returned. Every process must call this."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    parts = [part for part in root.modules() if isinstance(part, FSDPModule)]
    for part in parts:  # an unsharded parameter only exists once it has been gathered
        part.unshard()
    for part in parts:
        part.reshard()
    for name, parameter in module.named_parameters():
        if name in state and not isinstance(parameter, DTensor):
            parameter.grad = state[name]["whole"].to(parameter.device)
    for one in fsdp_parameters(root):
        kept = state.get(names[id(one.sharded_param)])
        if kept is None:
            continue
        if kept["part"] is not None:
            own = one.sharded_param
            own.grad = sharded_tensors.from_part(kept["part"].to(own.device), own)
        if kept["whole"] is not None:
            set_waiting_gradient(one, kept["whole"].to(device))
