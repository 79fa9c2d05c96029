"""At the start of a run, turn the user's steps and transfer hooks into callables with a fixed signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..callbacks.base import Callback, replaced
from ..data.datamodule import DataModule
from ..strategies.compile_networks import scope_of
from . import phases
from .hooks import method_of, of_one_loader, overridden
from .loss import LossReader
from .microbatch_metrics import JoiningStep
from .module import TrainingModule
from .profiling import by_strategy

if TYPE_CHECKING:
    from .run import Run


def takes_iterator(step: Callable[..., Any]) -> bool:
    """Return True if a step has the form ``training_step(dataloader_iter)``."""
    return next(iter(inspect.signature(step).parameters), "") == "dataloader_iter"


def bind_step(run: Run, name: str, several_loaders: bool = False) -> Callable[..., Any]:
    """Bind the module's step to ``(batch, batch_idx)``, plus ``dataloader_idx`` if there are several loaders."""
    module = run.module
    step = method_of(module, name, TrainingModule)
    if name != "predict_step" and overridden(module, name, TrainingModule) is None:
        raise NotImplementedError(f"{type(module).__name__} has no {name}. Define {name}(self, batch, batch_idx).")
    called = _with_arguments(step, name, type(module).__name__, several_loaders)  # type: ignore[arg-type]
    if run.strategy.splits_batches:
        called = JoiningStep(called, name, module, run.metrics)
    run.strategy.precision.model, run.strategy.precision.step_name = module, name
    bound = run.strategy.bind_step(called, run.model, training=name == "training_step")
    bound = around_training_step(run, bound) if name == "training_step" else bound
    if name == "training_step" and scope_of(run.trainer.compile) in ("step", "graphs"):
        return bound  # the step is traced, not called
    return by_strategy(run, name, bound)


def around_training_step(run: Run, bound: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the training step in the callbacks' ``around_training_step`` and, if requested, in a check of the loss."""
    module = run.module
    if run.trainer.detect_anomaly:
        finite, step = LossReader(module, run.strategy).finite, bound
        bound = lambda batch, batch_idx: finite(step(batch, batch_idx))  # noqa: E731
    for callback in run.trainer.callbacks:
        if replaced(callback, "around_training_step", Callback) is not None:
            bound = callback.around_training_step(run.trainer, module, bound)
    return bound


def check_step(module: TrainingModule, name: str) -> None:
    """Raise if a step's signature accepts neither the arguments for one loader nor those for several."""
    step, owner = getattr(module, name), type(module).__name__
    if not callable(step):
        raise TypeError(f"{owner}.{name} is {step!r}, which is not callable. Define {name}(self, batch, batch_idx).")
    if inspect.iscoroutinefunction(step):
        raise TypeError(
            f"{owner}.{name} is a coroutine (async def), whose body would never run. Define it with a plain def."
        )
    if name == "training_step" or _required(step) < 3:
        _with_arguments(step, name, owner, several_loaders=False)
    else:
        _with_arguments(step, name, owner, several_loaders=True)


def _positional(step: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(step).parameters.values()
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _required(step: Callable[..., Any]) -> int:
    return sum(p.default is p.empty for p in _positional(step))


def _with_arguments(step: Callable[..., Any], name: str, owner: str, several_loaders: bool) -> Callable[..., Any]:
    passed = 3 if several_loaders else 2
    parameters = inspect.signature(step).parameters.values()
    positional, takes = _positional(step), len(_positional(step))
    shown = f"{owner}.{name} takes {inspect.signature(step)}"
    more = ", dataloader_idx" if several_loaders else ""
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    wants_idx = [p.name for p in positional[2:3]] == ["dataloader_idx"]
    if wants_idx and _required(step) == 3 and not (several_loaders or keywords or name == "training_step"):
        raise RuntimeError(of_one_loader(f"{owner}.{name}", f"def {name}(self, batch, batch_idx)"))
    if keywords or _required(step) > passed or (takes == 0 and not open_ended):
        raise TypeError(
            f"{shown}, but it is called with (batch, batch_idx{more}). Define it as {name}(self, batch, "
            f"batch_idx{more})."
        )
    if open_ended:
        return step
    if several_loaders and takes < 3 and not (takes == 2 and positional[1].name == "dataloader_idx"):
        raise RuntimeError(
            f"{shown}, but there are several loaders. Define it as {name}(self, batch, batch_idx, dataloader_idx)."
        )
    if takes == 2 and positional[1].name == "dataloader_idx":
        return lambda batch, batch_idx, dataloader_idx=0: step(batch, dataloader_idx)
    return step if takes >= passed else lambda batch, batch_idx: step(batch)


def bind_mover(run: Run, dataloader_idx: int) -> Callable[[Any], Any] | None:
    """Return a function that moves a batch to the device and calls the transfer hooks; None if neither is needed."""
    hooks: dict[str, Callable[..., Any] | None] = {}
    for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
        data = None if run.datamodule is None else replaced(run.datamodule, name, DataModule)
        hooks[name] = data or overridden(run.module, name, TrainingModule)
    strategy = run.strategy
    move = strategy.batch_mover()
    if move is not None:
        move = by_strategy(run, "batch_to_device", move)
    convert = strategy.precision.convert_input if "convert_input" in strategy.precision.overrides else None
    if convert is None and not any(hooks.values()):
        return move
    before, transfer, after = hooks.values()

    def through_hooks(batch: Any) -> Any:
        place = metrics.enter(phases.BATCH_TRANSFER)
        if convert is not None:
            batch = convert(batch)
        if before is not None:
            batch = before(batch, dataloader_idx)
        if transfer is not None:
            batch = transfer(batch, strategy.device, dataloader_idx)
        if move is not None:
            batch = move(batch)
        if after is not None:
            batch = after(batch, dataloader_idx)
        metrics.back(place)
        return batch

    metrics = run.metrics
    return through_hooks
