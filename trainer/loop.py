"""Epochs and batches: counts, calls hooks, starts validation, stops. ``callbacks/base.py`` draws the order."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ..loggers import messages
from . import phases
from .binding import bind_mover, bind_step, takes_iterator
from .checkpoint.contents import restore_random
from .data.batches import Batches
from .data.handover import HandOver
from .data.loaders import seed_shuffling
from .evaluation import EvalLoop
from .hooks import overridden
from .loss import LossReader
from .module import TrainingModule
from .signals import interruption
from .step import IteratorStep, Step, choose_step, detached

if TYPE_CHECKING:
    from .optimizers import SchedulerConfig
    from .trainer import Trainer


class FitLoop:
    """One fit. Everything that depends on the configuration is bound here, before the first batch.

    Args:
        trainer: attached, with its module set up.
        resumed: the checkpoint this fit goes on from, or None.
    """

    def __init__(self, trainer: Trainer, resumed: dict[str, Any] | None) -> None:
        self.trainer = trainer
        self.state = trainer.state
        self.hooks = trainer._hooks
        self.metrics = trainer._metrics
        self.resumed = resumed
        self.validation = EvalLoop(trainer, "validate")
        self.max_steps = float("inf") if trainer.max_steps == -1 else trainer.max_steps
        self.max_epochs = float("inf") if trainer.max_epochs in (-1, None) else trainer.max_epochs
        self.val_clock = time.monotonic()
        self.takes_iterator = takes_iterator(trainer.training_module.training_step)
        self.own_lr_step = overridden(trainer.training_module, "lr_scheduler_step", TrainingModule) is not None
        self.losses = LossReader(trainer.training_module, trainer.strategy)

    def run(self) -> None:
        """Train until a limit is reached, somebody stops it, or an exception ends it."""
        trainer, state, hooks = self.trainer, self.state, self.hooks
        if self.resumed is None:
            self.sanity_check()
        start_batch = self.enter_epoch_after_resume()
        if trainer.limit_train_batches == 0 or self.finished():
            messages.info_once(f"Nothing to train: {self.why_finished()}.", key="nothing to train")
            return
        state.stage = "train"
        trainer._source.train()
        self.forward = bind_step(trainer, "training_step")
        self.metrics.enter(phases.ON_TRAIN_START)
        for hook in hooks.on_train_start:
            hook()
        while not self.finished():
            self.run_epoch(start_batch)
            start_batch = 0
        self.metrics.enter(phases.ON_TRAIN_END)
        for hook in hooks.on_train_end:
            hook()

    def enter_epoch_after_resume(self) -> int:
        """Move the counters of a resumed run to the batch it goes on with; return that batch's index."""
        state = self.state
        if state.epoch_done:
            state.epoch, state.epoch_done, state.batch_idx = state.epoch + 1, False, -1
        return state.batch_idx + 1

    # ---- one epoch -------------------------------------------------------------------------------------------------

    def run_epoch(self, start_batch: int) -> None:  # noqa: C901 - one straight line: a call less a batch, read in one go
        """One pass over the training data, from ``start_batch`` on."""
        trainer, state, hooks, metrics = self.trainer, self.state, self.hooks, self.metrics
        trainer._source.reload_if_due()
        metrics.enter(phases.ON_TRAIN_EPOCH_START)
        for hook in hooks.on_train_epoch_start:
            hook()
        step: Step = choose_step(trainer, self.forward, self.losses)
        if self.takes_iterator:
            step = IteratorStep(step)
        schedules = self.bind_schedulers()
        starts, ends = hooks.on_train_batch_start, hooks.on_train_batch_end
        max_steps, log_every = self.max_steps, trainer.log_every_n_steps
        validates, validation_due = self.validates_this_epoch(), self.validation_due
        num_batches, batches = trainer.num_training_batches, self.batches(start_batch)
        batch_idx = start_batch - 1
        metrics.enter(phases.TRAIN_BATCH)
        self.restore_random(start_batch == 0)
        iterator = iter(batches)
        self.restore_random(True)
        with closing(batches):
            for batch in iterator:
                batch_idx += 1
                if batch_idx >= num_batches:
                    raise RuntimeError(self.length_lie(batch_idx + 1, "more"))
                state.batch_idx = batch_idx
                state.is_last_batch = batch_idx + 1 == num_batches or batches.exhausted
                state.stepped = False
                metrics.batch = batch
                if starts and -1 in [hook(batch, batch_idx) for hook in starts]:
                    break
                outputs = step(batch, batch_idx)
                state.batches += 1
                if schedules:
                    self.step_lr()
                if ends:
                    outputs = detached(outputs)
                    for hook in ends:
                        hook(outputs, batch, batch_idx)
                if state.stepped and (state.updates % log_every == 0 or state.should_stop):
                    metrics.flush_step(state.updates, state.epoch)
                if validates and validation_due(batch_idx):
                    self.validate()
                if self.step_plateaus and state.stepped:
                    self.advance(self.step_plateaus, state.updates)
                if state.should_stop or state.signum or state.global_step >= max_steps:
                    if state.signum:
                        raise interruption(state.signum)
                    if state.global_step >= max_steps or self.may_stop():
                        break
            else:
                if batch_idx + 1 < num_batches and trainer._source.length_known():
                    raise RuntimeError(self.length_lie(batch_idx + 1, "only"))
        self.end_epoch()

    def batches(self, start_batch: int) -> Any:
        """The epoch's batches on the device, in an order that (seed, epoch) alone decide."""
        trainer, state = self.trainer, self.state
        source = trainer._source
        loader = source.train_loader
        seed_shuffling(loader, state.shuffle_seed, state.epoch)
        lookahead = source.looks_ahead(loader) or self.takes_iterator
        found = Batches(loader, bind_mover(trainer, 0), lookahead, source.cut(), start_batch)
        return HandOver(found, start_batch) if self.takes_iterator else found

    def restore_random(self, now: bool) -> None:
        """After a resume: put the random states back, where the uninterrupted run had them."""
        if now and self.resumed is not None:
            restore_random(self.resumed)
            self.resumed = None

    def end_epoch(self) -> None:
        """Everything that follows the last batch."""
        state, hooks, metrics = self.state, self.hooks, self.metrics
        state.epoch_done = True
        metrics.enter(phases.ON_TRAIN_EPOCH_END)
        metrics.epoch_ended = True
        for hook in hooks.on_train_epoch_end:
            hook()
        results = metrics.finish_epoch()
        if self.epoch_plateaus:
            self.advance(self.epoch_plateaus, state.epoch + 1)
        metrics.send_epoch(results, state.updates, state.epoch)
        for hook in hooks.on_train_epoch_end_monitors:
            hook()
        state.epoch, state.epoch_done, state.batch_idx = state.epoch + 1, False, -1
        if state.signum:
            raise interruption(state.signum)

    # ---- validation ------------------------------------------------------------------------------------------------

    def sanity_check(self) -> None:
        """Try a few validation batches ahead of training; leaves no trace in metrics or random states."""
        from .seed import isolate_rng

        trainer, state, hooks = self.trainer, self.state, self.hooks
        if not trainer.enable_validation or trainer.num_sanity_val_steps == 0:
            return
        state.stage = "sanity_check"
        with isolate_rng():
            self.metrics.enter(phases.SANITY_HOOK)
            for hook in hooks.on_sanity_check_start:
                hook()
            self.validation.run()
            self.metrics.enter(phases.SANITY_HOOK)
            for hook in hooks.on_sanity_check_end:
                hook()
        self.metrics.discard()

    def validates_this_epoch(self) -> bool:
        """Whether this epoch is one that validates, decided when it starts."""
        trainer = self.trainer
        every = trainer.check_val_every_n_epoch
        if not trainer.enable_validation or (every is not None and (self.state.epoch + 1) % every != 0):
            return False
        self.val_every = trainer._source.val_check_batch()
        return True

    def validation_due(self, batch_idx: int) -> bool:
        """Whether to validate after this batch."""
        trainer, state = self.trainer, self.state
        if trainer._val_seconds is not None:
            return time.monotonic() - self.val_clock >= trainer._val_seconds
        if state.should_stop and self.may_stop():
            return True
        if self.val_every == float("inf"):
            return state.is_last_batch
        done = state.batches if trainer.check_val_every_n_epoch is None else batch_idx + 1
        return done % self.val_every == 0

    def validate(self) -> None:
        """A validation in the middle or at the end of an epoch."""
        state, metrics = self.state, self.metrics
        metrics.drain()
        state.stage = "validate"
        self.validation.run(zero_grad=state.window == 0)
        state.stage = "train"
        self.val_clock = time.monotonic()
        metrics.enter(phases.TRAIN_BATCH)

    # ---- learning rates --------------------------------------------------------------------------------------------

    def bind_schedulers(self) -> bool:
        """Sort the schedulers by when they advance, once an epoch; False if none follows a batch."""
        trainer = self.trainer
        found = trainer.lr_scheduler_configs if trainer.training_module.automatic_optimization else []
        self.step_schedulers = [c for c in found if c.interval == "step" and not c.reduce_on_plateau]
        self.epoch_schedulers = [c for c in found if c.interval == "epoch" and not c.reduce_on_plateau]
        self.step_plateaus = [c for c in found if c.interval == "step" and c.reduce_on_plateau]
        self.epoch_plateaus = [c for c in found if c.interval == "epoch" and c.reduce_on_plateau]
        return bool(self.step_schedulers or self.epoch_schedulers or self.step_plateaus)

    def step_lr(self) -> None:
        """Advance the schedulers that follow this batch."""
        state = self.state
        if state.stepped and self.step_schedulers:
            self.advance(self.step_schedulers, state.updates)
        if state.is_last_batch and self.epoch_schedulers:
            self.advance(self.epoch_schedulers, state.epoch + 1)

    def advance(self, configs: list[SchedulerConfig], count: int) -> None:
        """Step each scheduler whose frequency divides ``count``, with the value it monitors."""
        if self.own_lr_step:
            self.metrics.enter(phases.LR_SCHEDULER_STEP)
        for config in configs:
            if count % config.frequency != 0:
                continue
            value = None
            if config.reduce_on_plateau:
                value = self.trainer.callback_metrics.get(config.monitor or "")
                if value is None:
                    self.missing_monitor(config)
                    continue
            self.trainer.training_module.lr_scheduler_step(config.scheduler, value)
        if self.own_lr_step:
            self.metrics.enter(phases.ON_TRAIN_EPOCH_END if self.state.epoch_done else phases.TRAIN_BATCH)

    def missing_monitor(self, config: SchedulerConfig) -> None:
        """A plateau scheduler's value was not logged: raise, or warn where the user said so."""
        logged = messages.names(sorted(self.trainer.callback_metrics), "and") or "nothing"
        text = (
            f"{type(config.scheduler).__name__} monitors {config.monitor!r}, which was not logged by the time it "
            "steps; "
            f"logged so far: {logged}. Log it with self.log, choose another 'monitor', or set 'strict': False."
        )
        if config.strict:
            raise RuntimeError(text)
        messages.warn_once(text)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def finished(self) -> bool:
        """Whether there is nothing left to train."""
        state = self.state
        if state.global_step >= self.max_steps or state.epoch >= self.max_epochs:
            return True
        return state.should_stop and self.may_stop()

    def may_stop(self) -> bool:
        """``should_stop`` is respected after ``min_epochs`` and ``min_steps``."""
        trainer, state = self.trainer, self.state
        if state.epoch >= (trainer.min_epochs or 0) and state.global_step >= (trainer.min_steps or 0):
            return True
        messages.info_once(
            f"Asked to stop, but goes on until min_epochs={trainer.min_epochs or 0} and "
            f"min_steps={trainer.min_steps or 0}."
        )
        return False

    def why_finished(self) -> str:
        """The reason there is nothing to train, with the numbers."""
        trainer, state = self.trainer, self.state
        if trainer.limit_train_batches == 0:
            return "limit_train_batches=0"
        return (
            f"the run stands at epoch {state.epoch} and step {state.global_step}, the limits are "
            f"max_epochs={trainer.max_epochs} and max_steps={trainer.max_steps}"
        )

    def length_lie(self, seen: int, word: str) -> str:
        """The error for a loader that yields more or fewer batches than it says."""
        return (
            f"The train_dataloader has a length of {self.trainer.num_training_batches} batches, but yielded {word} "
            f"{seen} in "
            f"epoch {self.state.epoch}. Windows, validation and schedules are planned from the length: correct "
            "__len__, "
            "or remove it so that Paceline looks one batch ahead instead."
        )
