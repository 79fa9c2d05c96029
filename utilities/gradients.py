"""Gradient norms."""

from __future__ import annotations

import torch
from torch import nn

from ..processes.device_transfer import full_value


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, torch.Tensor]:
    """Return the norm of each parameter's gradient and the total norm, for logging in ``on_before_optimizer_step``.

    Args:
        module: the module, after a backward pass. Parameters without a gradient are left out.
        norm_type: the order p of the p-norm, or ``"inf"``.
        group_separator: the string between the two parts of each name in the result.

    Returns:
        Scalars by name: ``grad_2.0_norm/layer.weight`` and so on, and ``grad_2.0_norm_total``, the norm of all these
        norms. The dict is empty if there are no gradients. With sharded gradients, these are the norms of the whole
        gradients, so all processes must call this.
    """
    order = float(norm_type)
    if order <= 0:
        raise ValueError(f"grad_norm: norm_type={norm_type!r} must be a positive number or 'inf'.")
    norms = {
        f"grad_{order}_norm{group_separator}{name}": full_value(parameter.grad.detach().norm(order))
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        norms[f"grad_{order}_norm_total"] = torch.stack([norm.float() for norm in norms.values()]).norm(order)
    return norms
