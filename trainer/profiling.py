"""Wraps what a profiler is to time, once, where it is bound. Without a profiler nothing is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..profilers.base import Profiler
    from .hooks import HookTable
    from .loop import FitLoop
    from .run import Run
    from .step import ManualStep

#: What of a strategy is timed. Modules that optimize by hand come here too.
_STRATEGY = ("backward", "optimizer_step", "reduce", "all_gather", "broadcast", "gather_objects", "barrier")
_METRICS = ("flush_step", "send_epoch", "finish_epoch", "drain")
_FETCHES = {"validate": "val_next", "test": "test_next", "predict": "predict_next"}


def setup(run: Run, stage: str) -> None:
    """A run begins: the profiler learns where, and what all runs share is wrapped."""
    profiler = run.trainer.profiler
    if not profiler.active:
        return
    profiler.setup(stage, run.strategy.local_rank, run.trainer.log_dir or run.trainer.default_root_dir)
    profiler.connect(run.trainer)
    strategy, owner = run.strategy, type(run.strategy).__name__
    for name in _STRATEGY:
        setattr(strategy, name, profiler.around(f"[Strategy]{owner}.{name}", getattr(strategy, name)))
    run.saver.save = profiler.around("save_checkpoint", run.saver.save)
    run.saver.wait = profiler.around("wait_for_checkpoint", run.saver.wait)
    metrics = run.metrics  # the store of self.log, which is new in each run
    for name in _METRICS:
        setattr(metrics, name, profiler.around(f"[Logging].{name}", getattr(metrics, name)))


def wrap_hooks(profiler: Profiler, table: HookTable) -> None:
    """Every hook that somebody defines, under the name of who does."""
    for name, hooks in vars(table).items():
        setattr(table, name, tuple(profiler.around(_name(hook, name), hook) for hook in hooks))


def _name(hook: Callable[..., Any], name: str) -> str:
    from ..callbacks.base import Callback
    from ..data.datamodule import DataModule

    owner = getattr(hook.func if isinstance(hook, partial) else hook, "__self__", None)
    if isinstance(owner, Callback):
        return f"[Callback]{owner.state_key}.{name.removesuffix('_monitors')}"
    kind = "DataModule" if isinstance(owner, DataModule) else "TrainingModule"
    return f"[{kind}]{type(owner).__name__}.{name}"


def wrap_bound(run: Run, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A step or a transfer, as it was bound."""
    profiler = run.trainer.profiler
    if not profiler.active:
        return function
    return profiler.around(f"[Strategy]{type(run.strategy).__name__}.{name}", function)


def wrap_fit(run: Run, loop: FitLoop) -> None:
    """The parts of a fit."""
    profiler = run.trainer.profiler
    if profiler.active:
        loop.run_epoch = profiler.around("run_training_epoch", loop.run_epoch)
        loop.validation.validate = profiler.around("run_validation", loop.validation.validate)


class ProfiledStep:
    """A step whose calls are timed."""

    def __init__(self, step: ManualStep, timed: Callable[..., Any]) -> None:
        self.timed, self.finish_window = timed, step.finish_window

    def __call__(self, batch: Any, batch_idx: int) -> Any:
        return self.timed(batch, batch_idx)


def wrap_parts(run: Run, step: ManualStep) -> None:
    """What of a step nobody else times."""
    profiler = run.trainer.profiler
    if not profiler.active:
        return
    owner = type(run.module).__name__
    for part, name in (("clip", "configure_gradient_clipping"), ("clear", "optimizer_zero_grad")):
        function = getattr(step, part, None)
        if function is not None:
            setattr(step, part, profiler.around(f"[TrainingModule]{owner}.{name}", function))
    through = getattr(step, "step_through_module", None)
    if through is not None:
        step.step_through_module = profiler.around(f"[TrainingModule]{owner}.optimizer_step", through)  # type: ignore[attr-defined]


def wrap_step(run: Run, step: ManualStep) -> Any:
    """The step of an epoch, as the loop calls it."""
    profiler = run.trainer.profiler
    return ProfiledStep(step, profiler.around("run_training_batch", step)) if profiler.active else step


def started(run: Run, batches: Any) -> Any:
    """The iterator over a training epoch's batches; what is fetched ahead begins to be fetched here."""
    profiler, name = run.trainer.profiler, "[_TrainingEpochLoop].train_dataloader_next"
    if not profiler.active:
        return iter(batches)
    return profiler.iterate(name, profiler.around(name, iter)(batches))


def fetched(run: Run, batches: Any, kind: str) -> Any:
    """The batches of an evaluation."""
    profiler = run.trainer.profiler
    return profiler.iterate(f"[_EvaluationLoop].{_FETCHES[kind]}", batches) if profiler.active else batches


def report_split(run: Run) -> None:
    """Tell the callbacks how the run's time was split."""
    trainer, split = run.trainer, run.trainer.profiler.split()
    for callback in trainer.callbacks if split else ():
        callback.on_profile(trainer, run.module, type(trainer.profiler).__name__, split)


def teardown(run: Run, stage: str) -> None:
    """The run is over: say what was found, and unwrap what stays."""
    profiler = run.trainer.profiler
    if not profiler.active:
        return
    for owner, names in ((run.strategy, _STRATEGY), (run.saver, ("save", "wait"))):
        for name in names:
            vars(owner).pop(name, None)
    try:
        profiler.describe()
    finally:
        profiler.teardown(stage)
