"""What a half-migrated loop still does by itself, found once when the first backward runs."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from .. import messages
from .optimizers import AcceleratedOptimizer

if TYPE_CHECKING:
    from .accelerator import Accelerator
    from .loaders import PreparedLoader
    from .models import PreparedModel


def check_optimizers(accelerator: Accelerator) -> None:
    """Raise if an optimizer that was not prepared would step with gradients that are not complete.

    It matters where gradients are accumulated, scaled, weighed by items or sharded. Only models without a prepared
    optimizer are looked for, so a complete script pays nothing.

    Raises:
        RuntimeError: there is one.
    """
    state = accelerator.gradient_state
    matters = state.num_steps > 1 or state.window.by_items or accelerator.scaler is not None or accelerator._shards
    served = {id(one.placement) for one in accelerator._optimizers}
    lacking = [one for one in accelerator._placements.values() if not one.frozen and id(one) not in served]
    if not matters or not any(parameter.requires_grad for one in lacking for parameter in one.parameters.values()):
        return
    known = {id(one.optimizer) for one in accelerator._optimizers}
    for found in gc.get_objects():
        kind = type(found)  # isinstance would ask a weak proxy, whose object may have gone
        if not issubclass(kind, Optimizer) or issubclass(kind, AcceleratedOptimizer) or id(found) in known:
            continue
        owner = _owner(found, lacking)
        if owner is not None:
            raise RuntimeError(_forgotten(accelerator, found, owner))


def check_shared(accelerator: Accelerator) -> None:
    """Warn if what was not prepared makes the processes train apart, or on the same samples."""
    processes = accelerator.strategy.num_data_ranks
    if processes == 1:
        return
    apart = [type(one.optimizer).__name__ for one in accelerator._optimizers if one.placement is None]
    if apart or all(one.frozen for one in accelerator._placements.values()):
        what = f"{apart[0]} has no parameter of a prepared model" if apart else "no model was prepared"
        messages.warn_once(
            f"At accelerator.backward {what}, so the {processes} processes do not average its gradients and train "
            "apart. Pass both to prepare: model, optimizer = accelerator.prepare(model, optimizer)."
        )
    if not accelerator.gradient_state.by_hand and not any(_is_used(one) for one in accelerator._dataloaders):
        messages.warn_once(
            f"At accelerator.backward no prepared loader was in use. If the loader gives each of the {processes} "
            "processes the same samples, they all do the same work: loader = accelerator.prepare(loader)."
        )


def _is_used(loader: PreparedLoader) -> bool:
    return loader.epoch > 0 or loader.batches_done > 0


def _owner(optimizer: Optimizer, models: list[PreparedModel]) -> PreparedModel | None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return next((model for model in models if any(model.current(one) is not None for one in parameters)), None)


def _forgotten(accelerator: Accelerator, optimizer: Optimizer, model: PreparedModel) -> str:
    steps = accelerator.gradient_state.num_steps
    if accelerator._shards:
        why = "whose parameters were replaced when the model was sharded, so it would train tensors that nobody uses"
    elif accelerator.scaler is not None:
        why = "so it would step with gradients that have fp16's loss scale in them"
    elif steps > 1:
        why = f"so it would step after every micro-batch of {steps}"
    else:
        why = "so it would step with gradients that backward(num_items=...) has not divided by the number of items yet"
    return (
        f"{type(optimizer).__name__} has parameters of the prepared {type(model.module).__name__} but was not prepared "
        f"itself, {why}. Pass both to prepare: model, optimizer = accelerator.prepare(model, optimizer)."
    )
