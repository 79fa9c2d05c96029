"""Check, before anything runs, that the settings allow the whole training step to be compiled."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch.optim import LBFGS, Optimizer

from .. import messages
from ..callbacks.base import Callback, overridden
from ..strategies.base import SingleDevice
from ..strategies.compile_networks import scope_of
from ..strategies.precision.base import BACKWARD, CLIPPING
from ..torch_private import is_of_scheduler, step_hooks
from .bind_steps import takes_iterator
from .module import TrainingModule

if TYPE_CHECKING:
    from .run import Run
    from .trainer import Trainer

#: Hooks that run in the middle of a step.
HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
#: Methods of a module that change what a step does.
METHODS = ("backward", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad")
_INSTEAD = "or use compile=True, which compiles the networks and leaves the step in Python"


def check_trainer(trainer: Trainer) -> None:
    """Raise a ValueError for a trainer that cannot run its step as one graph."""
    scope, strategy = scope_of(trainer.compile), trainer.strategy
    if scope not in ("step", "graphs"):
        return
    asked = f"Trainer(compile={trainer.compile!r}"
    if scope == "graphs" and strategy.device.type != "cuda":
        raise ValueError(
            f"{asked}) on {strategy.device}: CUDA graphs need a CUDA device. Use compile='step', which compiles the "
            "whole step on any device."
        )
    if type(strategy) is not SingleDevice:
        raise ValueError(
            f"{asked}, strategy={strategy.names[0] if strategy.names else type(strategy).__name__!r}): gradients are "
            "reduced across processes while backward runs, and the graph cannot contain this communication. Train on "
            f"one device, {_INSTEAD}."
        )
    if strategy.precision.scaler is not None:
        raise ValueError(
            f"{asked}, precision={strategy.precision.name!r}): because of the loss scaling, the host has to read the "
            "gradients to decide whether to step, which is impossible inside a graph. Use precision='bf16-mixed', "
            f"{_INSTEAD}."
        )
    own = sorted(strategy.precision.overrides & {*CLIPPING, *BACKWARD, "optimizer_step"})
    if own:
        raise ValueError(
            f"{asked}): {type(strategy.precision).__name__} overrides {messages.names(own, last='and')}, which would "
            f"have to run in the middle of the graph. Leave out this precision, {_INSTEAD}."
        )
    if trainer.detect_anomaly:
        raise ValueError(
            f"{asked}, detect_anomaly=True): a compiled step cannot tell which operation failed, and its loss is "
            "known only after the weights have changed. Look for the anomaly without compile."
        )
    if scope == "graphs" and trainer.accumulate_grad_batches > 1:
        raise ValueError(
            f"{asked}, accumulate_grad_batches={trainer.accumulate_grad_batches}): a CUDA graph does not keep "
            "gradients from one batch to the next. Use compile='step', or a larger batch."
        )


def check_module(run: Run) -> None:
    """Raise a ValueError for a module or callback whose code would have to run in the middle of the graph."""
    check_trainer(run.trainer)  # a callback may have changed the trainer
    module, owner = run.module, type(run.module).__name__
    if not module.automatic_optimization:
        _refuse(run, f"{owner} uses manual optimization, which cannot become one graph", "Use automatic optimization")
    if takes_iterator(module.training_step):
        _refuse(
            run,
            f"{owner}.training_step fetches batches from dataloader_iter, which the graph cannot do",
            "Use training_step(batch, batch_idx)",
        )
    for name in METHODS:
        if overridden(module, name, TrainingModule) is not None:
            _refuse(run, f"{owner}.{name} would have to run in the middle of the graph", "Leave it out")
    for callback in run.trainer.callbacks:
        if overridden(callback, "around_training_step", Callback) is not None:
            _refuse(
                run,
                f"{type(callback).__name__} needs the loss before backward, in the middle of the graph",
                "Leave it out",
            )
    for name in HOOKS:
        for hook in getattr(run.hooks, name):
            who = getattr(hook.func if isinstance(hook, partial) else hook, "__self__", None)
            what = f"{owner if who is None else type(who).__name__}.{name}"
            _refuse(run, f"{what} would have to run in the middle of the graph", "Leave it out")


def check_optimizers(run: Run) -> None:
    """Raise a ValueError for optimizers whose step cannot be part of the graph."""
    if not run.optimizers:
        _refuse(run, "there is no optimizer", "Return one from configure_optimizers")
    for optimizer in run.optimizers:
        _check_optimizer(run, optimizer)


def _check_optimizer(run: Run, optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        _refuse(run, f"{name} evaluates the loss several times per step", "Use another optimizer")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        _refuse(run, f"{name}(differentiable=True) keeps the graph of its step", "Leave out differentiable")
    if cycles_momentum(run) and scope_of(run.trainer.compile) == "graphs":
        _refuse(run, "a scheduler changes momentum, which is constant in a CUDA graph", "Pass cycle_momentum=False")
    if step_hooks(optimizer):
        _refuse(
            run,
            f"{name} has step hooks, which would have to run in the middle of the graph",
            "Move their work to on_train_batch_end",
        )
    own = vars(optimizer).get("step")
    if own is not None and not is_of_scheduler(own):
        _refuse(run, f"the step method of this {name} was replaced", "Override step in a subclass")
    if overridden(optimizer, "zero_grad", Optimizer) is not None:
        _refuse(run, f"{name}.zero_grad would have to run in the middle of the graph", "Leave it out")


def cycles_momentum(run: Run) -> bool:
    """Return True if a scheduler changes the momentum as well as the learning rate."""
    return any(getattr(config.scheduler, "cycle_momentum", False) for config in run.lr_scheduler_configs)


def _refuse(run: Run, why: str, fix: str) -> None:
    raise ValueError(f"Trainer(compile={run.trainer.compile!r}): {why}. {fix}, {_INSTEAD}.")
