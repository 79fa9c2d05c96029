"""Gradient norms."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import nn

from .. import messages
from ..processes.device_transfer import full_value


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, torch.Tensor]:
    """Return the norm of each parameter's gradient and the total norm, for logging in ``on_before_optimizer_step``.

    Args:
        module: the module, after a backward pass. Parameters without a gradient are left out.
        norm_type: the order p of the p-norm, or ``"inf"``.
        group_separator: the string between the two parts of each name in the result.

    Returns:
        Scalars by name: ``grad_2.0_norm/layer.weight`` and so on, and ``grad_2.0_norm_total``, the norm of all these
        norms. The dict is empty if there are no gradients. With sharded gradients (FSDP, DeepSpeed), the result
        contains the norms of the full gradients, so all processes must call this function. In a pipeline, each process
        gets the norms of all stages. Under DeepSpeed, the module must be the TrainingModule, because only its Trainer
        has the gradients.

    Raises:
        ValueError: the module is part of a model that a pipeline has split, so other stages' gradients are unknown.
    """
    order = float(norm_type)
    if order <= 0:
        raise ValueError(f"grad_norm: norm_type={norm_type!r} must be a positive number or 'inf'.")
    strategy = getattr(getattr(module, "_trainer", None), "strategy", None)
    read = attrgetter("grad") if strategy is None else strategy.full_gradient
    gradients = ((name, read(parameter)) for name, parameter in module.named_parameters())
    norms = {
        f"grad_{order}_norm{group_separator}{name}": full_value(gradient.detach().norm(order))
        for name, gradient in gradients
        if gradient is not None
    }
    if any(parameter.is_meta for parameter in module.parameters()):
        norms = _of_all_stages(module, norms)
    if norms:
        norms[f"grad_{order}_norm_total"] = torch.stack([norm.float() for norm in norms.values()]).norm(order)
    return norms


def _of_all_stages(module: nn.Module, norms: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the norms of all processes, because each process of a pipeline has only its own stages' weights."""
    trainer = getattr(module, "trainer", None)
    if trainer is None:
        raise ValueError(
            f"grad_norm got {messages.a(module)} with weights on the meta device. In a pipeline, such weights belong "
            "to other processes, and only the TrainingModule can reach them. Pass the TrainingModule: grad_norm(self, "
            "2)."
        )
    device = trainer.strategy.device
    found = trainer.strategy.gather_objects({name: norm.item() for name, norm in norms.items()})
    return {name: torch.tensor(norm, device=device) for one in found for name, norm in one.items()}
