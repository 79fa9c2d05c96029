"""Advance learning rate schedulers when they are due, with the values that they monitor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import messages
from . import phases
from .hooks import method_of, overridden
from .module import TrainingModule
from .optimizers import SchedulerConfig

if TYPE_CHECKING:
    from .run import Run


class Schedules:
    """A run's schedulers, regrouped by interval in each epoch, because callbacks may replace them."""

    def __init__(self, run: Run, configs: list[SchedulerConfig]) -> None:
        self.run = run
        self.own = overridden(run.module, "lr_scheduler_step", TrainingModule) is not None
        self.step_one = method_of(run.module, "lr_scheduler_step", TrainingModule)
        found = configs if run.module.automatic_optimization else []
        self.step = [c for c in found if c.interval == "step" and not c.reduce_on_plateau]
        self.epoch = [c for c in found if c.interval == "epoch" and not c.reduce_on_plateau]
        self.step_plateaus = [c for c in found if c.interval == "step" and c.reduce_on_plateau]
        self.epoch_plateaus = [c for c in found if c.interval == "epoch" and c.reduce_on_plateau]
        self.per_batch = bool(self.step or self.epoch)

    def after_batch(self) -> None:
        """Advance the schedulers that are due after a batch.

        "step" schedulers advance if an optimizer stepped, and "epoch" schedulers after the last batch.
        """
        state = self.run.state
        if state.stepped and self.step:
            self.advance(self.step, self.steps())
        if state.is_last_batch and self.epoch:
            self.advance(self.epoch, state.epoch + 1)

    def steps(self) -> int:
        """Return the number of updates so far, on which the frequency of "step" schedulers is based."""
        return self.run.state.updates

    def advance(self, configs: list[SchedulerConfig], count: int) -> None:
        """Step each scheduler whose frequency divides ``count``; plateau schedulers get the value that they monitor."""
        run, metrics = self.run, self.run.metrics
        if self.own:
            metrics.enter(phases.LR_SCHEDULER_STEP)
        for config in configs:
            if count % config.frequency != 0:
                continue
            value = None
            if config.reduce_on_plateau:
                value = run.trainer.callback_metrics.get(config.monitor or "")
                if value is None:
                    self.missing_monitor(config)
                    continue
                if run.strategy.world_size > 1:  # values may differ between processes, but all must use the same rate
                    value = run.strategy.reduce(value.to(run.strategy.device), "mean")
            self.step_one(config.scheduler, value)
        if self.own:
            metrics.enter(phases.ON_TRAIN_EPOCH_END if run.state.epoch_done else phases.TRAIN_BATCH)

    def missing_monitor(self, config: SchedulerConfig) -> None:
        """Report that a plateau scheduler's monitored value was not logged: raise if ``strict``, else warn."""
        logged = messages.names(sorted(self.run.trainer.callback_metrics), "and") or "nothing"
        text = (
            f"{type(config.scheduler).__name__} monitors {config.monitor!r}, which had not been logged when the "
            f"scheduler was due. Logged so far: {logged}. Log {config.monitor!r} with self.log, choose another "
            "'monitor', or set 'strict': False."
        )
        if config.strict:
            raise RuntimeError(text)
        messages.warn_once(text)
