"""Connect a run to its profiler: tell it when the run begins and ends, and bind the callables that it times.

Every callable is bound once through ``Profiler.around``, which returns it unchanged if there is no profiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from .run import Run

T = TypeVar("T")


def setup(run: Run, stage: str) -> None:
    """Tell the profiler that a run begins, and let it time the strategy and the metrics."""
    trainer, profiler = run.trainer, run.trainer.profiler
    if profiler.active:
        local_rank = run.strategy.local_rank if run.strategy.world_size > 1 else None
        profiler.setup(stage, local_rank, trainer.log_dir or trainer.default_root_dir)
        profiler.connect(trainer)
        run.strategy.time_with(profiler.around)
        run.metrics.time_with(profiler.around)


def by_strategy(run: Run, name: str, function: Callable[..., T]) -> Callable[..., T]:
    """Return a wrapper with which the profiler times a step or a transfer of the strategy."""
    return run.trainer.profiler.around(f"[Strategy]{type(run.strategy).__name__}.{name}", function)


def by_module(run: Run, name: str, function: Callable[..., T]) -> Callable[..., T]:
    """Return a method of the module, timed by the profiler."""
    return run.trainer.profiler.around(f"[TrainingModule]{type(run.module).__name__}.{name}", function)


def by_datamodule(run: Run, name: str) -> Callable[..., Any]:
    """Return a method of the DataModule, timed by the profiler."""
    method = getattr(run.datamodule, name)
    return run.trainer.profiler.around(f"[DataModule]{type(run.datamodule).__name__}.{name}", method)


def timed_in_run(action_name: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorator that times rarely called methods of objects with an attribute ``_run``."""

    def decorate(method: Callable[..., T]) -> Callable[..., T]:
        @wraps(method)
        def timed(self: Any, *args: Any, **kwargs: Any) -> T:
            return self._run.trainer.profiler.around(action_name, method)(self, *args, **kwargs)

        return timed

    return decorate


def report_split(run: Run) -> None:
    """Report to the callbacks how the profiler split the run's time."""
    trainer, split = run.trainer, run.trainer.profiler.split()
    for callback in trainer.callbacks if split else ():
        callback.on_profile(trainer, run.module, type(trainer.profiler).__name__, split)


def teardown(run: Run, stage: str) -> None:
    """Show the profiler's report and release its resources."""
    profiler = run.trainer.profiler
    if not profiler.active:
        return
    run.strategy.time_with(None)
    try:
        profiler.describe()
    finally:
        profiler.teardown(stage)
