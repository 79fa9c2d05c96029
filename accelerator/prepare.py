"""``accelerator.prepare``: models, optimizers, schedulers and loaders, whatever the order they are given in."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from .. import messages
from .errors import answer
from .loaders import PreparedLoader, prepare_data_loader
from .models import PreparedModel, compiler_of, is_prepared, migrated
from .optimizers import AcceleratedOptimizer
from .schedulers import AcceleratedScheduler

if TYPE_CHECKING:
    from .accelerator import Accelerator

_PREPARED = (PreparedLoader, AcceleratedOptimizer, AcceleratedScheduler)


def is_scheduler(value: Any) -> bool:
    """Whether something moves learning rates: torch's schedulers, and what has their methods."""
    if isinstance(value, (type, nn.Module, Optimizer)):
        return False
    return isinstance(value, LRScheduler) or all(
        callable(getattr(value, name, None)) for name in ("step", "state_dict", "load_state_dict", "get_last_lr")
    )


def prepare(accelerator: Accelerator, objects: Sequence[Any], placed: Sequence[bool | None]) -> list[Any]:
    """Prepare objects; returns what stands for each, in their order.

    Args:
        accelerator: whose strategy, precision and windows they get.
        objects: anything; what is no model, optimizer, scheduler or loader comes back as it is.
        placed: for each, whether it goes to the device; None: as the Accelerator says.
    """
    found: list[Any] = list(objects)
    models: list[PreparedModel] = []
    compilers: list[Callable[[Any], Any] | None] = []
    for index, value in enumerate(objects):
        if isinstance(value, GradScaler):
            raise ValueError(_SCALER)
        if isinstance(value, nn.Module) and not is_prepared(value) and id(value) not in accelerator._placements:
            compilers.append(compiler_of(value))
            models.append(start_model(accelerator, value, placed[index]))
            found[index] = models[-1].module
    for index, value in enumerate(objects):
        if isinstance(value, Optimizer) and not isinstance(value, _PREPARED):
            found[index] = prepare_optimizer(accelerator, value)
    for model, compiler in zip(models, compilers, strict=True):
        finish_model(accelerator, model, compiler)
    accelerator.strategy.precision.setup_optimizers([one.optimizer for one in accelerator._optimizers])
    for index, value in enumerate(objects):
        if isinstance(value, DataLoader) and not isinstance(value, _PREPARED):
            found[index] = prepare_loader(accelerator, value, placed[index])
        elif not isinstance(value, _PREPARED) and is_scheduler(value):
            found[index] = prepare_scheduler(accelerator, value)
    return found


def start_model(
    accelerator: Accelerator, model: nn.Module, place: bool | None, evaluation: bool = False
) -> PreparedModel:
    """Bring a model to its device, and shard or wrap it; its forward is routed when its optimizers are known."""
    model = migrated(model)
    if accelerator._shards:
        _refuse_shared(accelerator, model)
    strategy = accelerator.strategy.for_another_module()
    strategy.settle_batch_norm(model, False)
    prepared = PreparedModel(model, strategy, frozen=evaluation)
    prepared.set_up(accelerator.device_placement if place is None else place)
    accelerator._models.append(model)
    accelerator._placements[id(model)] = prepared
    return prepared


def _refuse_shared(accelerator: Accelerator, model: nn.Module) -> None:
    """Raise if a model shares parameters with one that is sharded, which has others in their place."""
    for other in accelerator._placements.values():
        shared = [name for name, parameter in model.named_parameters() if other.current(parameter) is not None]
        if shared:
            raise ValueError(
                f"accelerator.prepare got {messages.a(model)} that shares {shared[0]} with the prepared "
                f"{type(other.module).__name__}: {type(other.strategy).__name__} puts a model's parameters in parts, "
                "which two models cannot share, so they would be trained apart. Put both in one module (an nn.Module "
                "with the two as children) and prepare that, or use strategy='ddp'."
            )


def finish_model(accelerator: Accelerator, model: PreparedModel, compiler: Callable[[Any], Any] | None) -> None:
    """Let the model's forward go through the strategy."""
    if not model.frozen:
        own = [one.optimizer for one in accelerator._optimizers if one.placement is model]
        if own:
            model.strategy.setup_optimizers(own)
    words = partial(answer, weakref.ref(accelerator), model)
    model.route(accelerator.output_dtype, partial(_given, compiler) if compiler else accelerator._compiler, words)
    accelerator._windows.pop((), None)
    accelerator._checked = False


def _given(compiler: Callable[[Any], Any], module: nn.Module) -> Callable[[Any], Any]:
    return compiler


def prepare_optimizer(accelerator: Accelerator, optimizer: Optimizer) -> AcceleratedOptimizer:
    """An optimizer that steps with complete windows, through the strategy of the model whose parameters it has."""
    old, before = set(optimizer.state), optimizer.state_dict() if optimizer.state and accelerator._shards else None
    owners = [model for model in accelerator._placements.values() if model.adopt(optimizer)]
    placement = owners[0] if owners else None
    now = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if before is not None and placement is not None and old - now:  # of parameters that were replaced since
        optimizer.state.clear()
        placement.strategy.load_optimizer_state(placement.module, optimizer, before)
    strategy = accelerator.strategy if placement is None else placement.strategy
    if accelerator._shards and len(owners) > 1:
        names = messages.names([type(model.module).__name__ for model in owners], last="and")
        raise ValueError(
            f"{type(optimizer).__name__} has parameters of {len(owners)} prepared models ({names}), and "
            f"{type(strategy).__name__} steps each model by itself. Make an optimizer for each, or one model that "
            "holds them all."
        )
    if placement is None:
        if accelerator._shards:
            raise ValueError(
                f"{type(optimizer).__name__} has no parameter of a prepared model, and {type(strategy).__name__} "
                "replaces parameters when it shards a model. Pass both to one call: "
                "accelerator.prepare(model, optimizer)."
            )
        strategy.setup_optimizers([optimizer])
    elif is_prepared(placement.module):
        placement.strategy.setup_optimizers([optimizer])
    wrapper = AcceleratedOptimizer(optimizer, strategy, accelerator.gradient_state, owners, accelerator._clip_norm)
    wrapper.explain = partial(answer, weakref.ref(accelerator), placement)
    accelerator._optimizers.append(wrapper)
    accelerator.gradient_state.trains = True
    return wrapper


def prepare_scheduler(accelerator: Accelerator, scheduler: Any) -> AcceleratedScheduler:
    """A scheduler that moves with the optimizer whose learning rates it sets."""
    inner = getattr(scheduler, "optimizer", None)
    owners = [one for one in accelerator._optimizers if one is inner or one.optimizer is inner]
    if inner is not None and not owners:
        messages.warn_once(
            f"{type(scheduler).__name__} was prepared, but its optimizer was not, so it moves with all that were. "
            "Pass the optimizer to prepare as well."
        )
    wrapper = AcceleratedScheduler(
        scheduler,
        owners or accelerator._optimizers,
        accelerator.gradient_state,
        accelerator.step_scheduler_with_optimizer,
        accelerator.strategy.num_data_ranks if accelerator.scheduler_steps == "per_sample" else 1,
    )
    accelerator._schedulers.append(wrapper)
    return wrapper


def prepare_loader(accelerator: Accelerator, loader: DataLoader[Any], place: bool | None) -> PreparedLoader:
    """A loader that yields this process's batches, on the device."""
    prepared = prepare_data_loader(
        loader,
        accelerator.strategy,
        accelerator.dataloader_config,
        accelerator.gradient_state,
        accelerator._shuffle_seed(),
        accelerator.device_placement if place is None else place,
    )
    accelerator._dataloaders.append(prepared)
    return prepared


_SCALER = (
    "accelerator.prepare got a GradScaler. Under mixed_precision='fp16' Paceline scales losses itself, elsewhere none "
    "is needed: delete the scaler and its lines (scaler.scale, scaler.step, scaler.update), and call "
    "accelerator.backward(loss) and optimizer.step(). Settings of it go into "
    "Accelerator(kwargs_handlers=[GradScalerKwargs(...)])."
)
