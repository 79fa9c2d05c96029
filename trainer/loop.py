"""The loop over epochs and batches. ``callbacks/base.py`` shows the order of its hooks."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

from .. import messages
from ..data.batches import Batches, HandOver
from ..data.loaders import seed_shuffling, what_fetching_changes
from ..processes.seed import host_random_states, mixed
from . import phases
from .bind_steps import bind_mover, bind_step, takes_iterator
from .compiled_step import compiled_whole
from .loss import LossReader, LossWatch
from .lr_schedules import Schedules
from .manual_step_check import HandSteps
from .state import Pending
from .states import RunningStage
from .step import EmptyLastStep, IteratorStep, ManualStep, choose_step, detached, without_last_items
from .validation import Validation

if TYPE_CHECKING:
    from .resume import Resumed
    from .run import Run
    from .stopping import Reason


#: Read once, because looking up an enum's members is slow.
NOTHING, SCHEDULERS, LOGGING, PLATEAUS = Pending.NOTHING, Pending.SCHEDULERS, Pending.LOGGING, Pending.PLATEAUS
EPOCH_VALUES, TRAIN_END = Pending.EPOCH_VALUES, Pending.TRAIN_END


class FitLoop:
    """Runs one fit. Everything that depends on the configuration is bound before the first batch.

    Args:
        run: the prepared run, with its module set up.
        resumed: this rank's state in the checkpoint that this fit resumes from, or None.

    Attributes:
        at_epoch_start: the host's RNG states when the first batch of the current epoch was requested.
    """

    def __init__(self, run: Run, resumed: Resumed | None) -> None:
        self.run, self.state = run, run.state
        self.hooks, self.metrics = run.hooks, run.metrics
        self.resumed = resumed
        self.validation = Validation(run)
        self.stops = run.stops
        self.takes_iterator = takes_iterator(run.module.training_step)
        self.guarded = any(callback.skips_together for callback in run.trainer.callbacks)
        self.losses = LossReader(run.module, run.strategy, together=self.guarded)
        self.log_every = run.trainer.log_every_n_steps
        self.at_epoch_start: dict[str, Any] | None = None
        self._fetched: Batches | None = None
        self.hand_steps = HandSteps(run)
        run.fit = self
        self.profiler = run.trainer.profiler
        self.validate = self.profiler.around("run_validation", self.validation.validate)

    def train(self) -> None:
        """Train until a limit is reached, a stop is requested, or an exception ends the run."""
        run, state, metrics = self.run, self.state, self.metrics
        if self.resumed is None:
            self.validation.sanity_check()
        owed = self.owed()
        if state.epoch_done and owed is not EPOCH_VALUES:
            self.enter_next_epoch()
        if run.trainer.limit_train_batches == 0 or (self.finished() and owed is NOTHING):
            self.train_nothing()
            return
        state.stage = RunningStage.TRAINING
        metrics.losses = None if self.guarded else LossWatch(self.losses.owner)
        self.load_data()
        self.bind()
        self.advise()
        metrics.enter(phases.ON_TRAIN_START)
        for hook in self.hooks.on_train_start:
            hook()
        if self.resumed is not None and (owed in (EPOCH_VALUES, TRAIN_END) or state.next_batch == 0):
            self.resumed.restore()
        run_epoch = self.profiler.around("run_training_epoch", self.run_epoch)
        if owed is EPOCH_VALUES:
            self.finish_epoch()
        elif owed not in (NOTHING, TRAIN_END):
            run_epoch(state.next_batch)
        while not self.finished():
            run_epoch(state.next_batch)
        state.pending = NOTHING
        metrics.enter(phases.ON_TRAIN_END)
        for hook in self.hooks.on_train_end:
            hook()

    def bind(self) -> None:
        """Bind the training step; if the step and its update run as one graph, also prepare their compilation."""
        self.forward = bind_step(self.run, "training_step")
        self.whole = compiled_whole(self.run, self.forward)

    def owed(self) -> Pending:
        """Return the work that was pending when the checkpoint was written; it is done even if a limit is reached.

        If there is more to train now, a pending end of training or of an incomplete epoch is dropped.
        """
        state = self.state
        cut_short = state.pending is EPOCH_VALUES and not state.epoch_done
        ends = state.pending is TRAIN_END or cut_short
        if self.resumed is None or (ends and not self.at_limit()):
            state.pending = NOTHING
        return state.pending

    def train_nothing(self) -> None:
        """Report that there is nothing to train; restore the state, so that a new checkpoint equals the loaded one."""
        self.say_finished()
        if self.resumed is not None:
            self.resumed.restore()

    def load_data(self) -> None:
        """Create the loaders, and find the resume position in them."""
        self.run.source.train()
        if self.resumed is not None:
            self.resumed.find_batch()
        if self.validation.comes() and not self.run.source.reloads():
            self.run.source.load_evaluation("validate")

    def run_epoch(self, start_batch: int) -> None:  # noqa: C901 - straight-line code, with fewer calls per batch
        """Run one pass over the training data, starting at batch ``start_batch``."""
        run, state, hooks, metrics, validation = self.run, self.state, self.hooks, self.metrics, self.validation
        self.start_epoch()
        step, schedules, batches = self.step(), Schedules(run), self.batches(start_batch)
        run_batch = self.profiler.around("run_training_batch", step)
        starts, ends, stops = hooks.on_train_batch_start, hooks.on_train_batch_end, self.stops
        num_batches, max_steps = run.source.num_training_batches, limit(run.trainer.max_steps)
        log_every = self.log_every = run.trainer.log_every_n_steps
        often = validation.plan_epoch() or bool(schedules.step_plateaus)
        after_step, after_hooks = metrics.sharings()
        batch_idx, complete, outputs = start_batch - 1, False, None
        with closing(batches):
            iterator, over = self.started(batches, start_batch, schedules)
            for batch in () if over else iterator:
                batch_idx += 1
                if batch_idx >= num_batches:
                    raise RuntimeError(self.length_lie(f"at least {batch_idx + 1}"))
                state.batch_idx, state.stepped = batch_idx, False
                state.is_last_batch = batch_idx + 1 == num_batches or batches.exhausted
                metrics.batch = batch
                if starts and batch is not None and -1 in [hook(batch, batch_idx) for hook in starts]:
                    self.skip_rest(step, schedules)
                    complete = True
                    break
                outputs = run_batch(batch, batch_idx)
                if after_step.on:
                    after_step.meet()
                state.batches += 1
                state.next_batch, state.pending = batch_idx + 1, SCHEDULERS
                if not state.window:
                    state.settled = state.batches
                if schedules.per_batch:
                    schedules.after_batch()
                state.pending = LOGGING
                if ends:
                    outputs = detached(outputs)
                    for hook in ends:
                        hook(outputs, batch, batch_idx)
                if after_hooks.on:
                    after_hooks.meet()
                state.passed += 1
                reason = stops.at(state.passed) if state.stop else ""
                if often or reason or (state.stepped and state.updates % log_every == 0):
                    reason = self.after_hooks(schedules, reason, outputs)
                else:
                    state.pending = NOTHING
                if state.window:
                    continue  # training never stops inside a window
                if reason or state.global_step >= max_steps:
                    complete = self.leave_epoch(reason)
                    break
            else:
                complete = state.is_last_batch if over else self.check_length(batch_idx + 1, batches)
        self.end_epoch(schedules, complete, outputs)

    # ---- the parts of an epoch -------------------------------------------------------------------------------------

    def start_epoch(self) -> None:
        """Prepare the epoch before its first batch is fetched."""
        self.hand_steps.let_go()
        self.run.source.reload_if_due()
        self.metrics.enter(phases.ON_TRAIN_EPOCH_START)
        for hook in self.hooks.on_train_epoch_start:
            hook()
        self.metrics.enter(phases.TRAIN_BATCH)

    def step(self) -> ManualStep:
        """Create the epoch's step, because callbacks may have changed the optimizers or the accumulation."""
        if self.whole is not None:
            return self.whole.step(self.losses)
        empty = self.run.source.last_share == 0.0
        step = choose_step(
            self.run, without_last_items(self.state, self.forward) if empty else self.forward, self.losses
        )
        self.hand_steps.watch(step)
        step = EmptyLastStep(step) if empty else step
        return IteratorStep(step) if self.takes_iterator else step

    def batches(self, start_batch: int) -> Any:
        """Return the epoch's batches on the device, in an order that depends only on the seed and the epoch."""
        run, state, source = self.run, self.state, self.run.source
        loader = source.train_loader
        seed_shuffling(loader, state.shuffle_seed, state.epoch)
        lookahead = source.looks_ahead(loader) or self.takes_iterator
        resumed = self.resumed
        ended = resumed is not None and start_batch > 0 and resumed.ended
        knows_position = resumed is not None and resumed.load_loader(loader, mid_epoch=start_batch > 0 and not ended)
        skip = 0 if knows_position and not ended else start_batch
        found = self._fetched = Batches(
            loader,
            bind_mover(run, 0),
            lookahead,
            skip if ended else source.cut() - (start_batch - skip),
            skip,
            source.keeps_step(),
            seed=mixed(state.shuffle_seed, state.epoch, run.strategy.data_rank),
            remember=what_fetching_changes(loader) if lookahead else None,
            prepare=None if resumed is None or not start_batch else resumed.before_fetch,
        )
        return HandOver(found, start_batch, self.metrics) if self.takes_iterator else found

    def started(self, batches: Any, start_batch: int, schedules: Schedules) -> tuple[Any, bool]:
        """Return the batch iterator, and whether training is already over.

        When the fit resumes, this restores the saved run's state and finishes the batch after which it was saved.
        """
        resumed = self.resumed
        if resumed is not None and start_batch > 0:
            resumed.enter_epoch()
        self.at_epoch_start = host_random_states()
        name = "[_TrainingEpochLoop].train_dataloader_next"
        iterator = self.profiler.iterate(name, self.profiler.around(name, iter)(batches))  # fetching ahead begins here
        if resumed is not None and start_batch > 0:
            resumed.restore()
            self.finish_batch(schedules)
        self.resumed = None
        return iterator, self.at_limit() or self.stops.here() == "asked"

    def place_in_data(self) -> dict[str, Any]:
        """Return this rank's position in the data for a checkpoint; a resumed run refetches a prefetched batch."""
        if self.resumed is not None:
            return self.resumed.place_in_data()
        batches = None if self.state.epoch_done else self._fetched
        ended = batches is not None and batches.exhausted
        ahead = {} if batches is None or ended else batches.before_ahead or {}
        return {
            "random_at_epoch_start": self.at_epoch_start,
            "ended": ended,
            "random_before_fetch": ahead.get("random"),
            "loader": ahead.get("loader"),
        }

    def after_hooks(self, schedules: Schedules, reason: Reason, outputs: Any = None) -> Reason:
        """Do the work after a batch's last hooks: logging, validation, plateau schedulers.

        After a resume, do only the work that the saved run had not done yet.

        ``reason`` is why the run stops after this batch; empty if it does not stop. Returns ``reason``, or a new reason
        from validation.
        """
        state, validation = self.state, self.validation
        if state.pending is LOGGING and state.stepped and (state.updates % self.log_every == 0 or reason == "asked"):
            self.metrics.flush_step(state.x_axis(state.updates), state.epoch, outputs)
        if state.pending is not PLATEAUS and validation.every is not None and validation.due(state.batch_idx, reason):
            reason = self.validate()
        if schedules.step_plateaus and state.stepped:
            schedules.advance(schedules.step_plateaus, state.updates)
        state.pending = NOTHING
        return reason

    def finish_batch(self, schedules: Schedules) -> None:
        """Do the work that is still pending for the last batch, such as schedulers and logging."""
        state = self.state
        if state.pending is SCHEDULERS:
            schedules.after_batch()
            state.pending = LOGGING
        if state.pending is not NOTHING:
            self.after_hooks(schedules, "")

    def skip_rest(self, step: ManualStep, schedules: Schedules) -> None:
        """Complete the window and the end-of-batch work of an epoch whose remaining batches a hook skipped."""
        state, validation = self.state, self.validation
        step.finish_window()
        state.is_last_batch, state.pending, validation.every = True, SCHEDULERS, None
        self.finish_batch(schedules)

    def finish_epoch(self) -> None:
        """After resuming from a checkpoint that was written in ``on_train_epoch_end``, finish that epoch."""
        self.resumed = None
        self.metrics.enter(phases.ON_TRAIN_EPOCH_END)
        self.metrics.end_epoch()
        self.close_epoch(Schedules(self.run), complete=self.state.epoch_done)

    def end_epoch(self, schedules: Schedules, complete: bool, outputs: Any) -> None:
        """Do the end-of-epoch work. An epoch that is not ``complete`` is continued by a later fit."""
        state, hooks, metrics = self.state, self.hooks, self.metrics
        state.epoch_done, state.pending = complete, EPOCH_VALUES
        metrics.enter(phases.ON_TRAIN_EPOCH_END)
        metrics.end_epoch()
        for hook in hooks.on_train_epoch_end:
            hook()
        self.close_epoch(schedules, complete, outputs)

    def close_epoch(self, schedules: Schedules, complete: bool, outputs: Any = None) -> None:
        """Do the work that follows the ``on_train_epoch_end`` hooks."""
        state, hooks, metrics = self.state, self.hooks, self.metrics
        results = metrics.finish_epoch()
        if complete and schedules.epoch_plateaus:
            schedules.advance(schedules.epoch_plateaus, state.epoch + 1)
        metrics.send_epoch(results, state.x_axis(state.updates), state.epoch)
        metrics.look_at_losses(outputs)
        state.pending = TRAIN_END
        metrics.end_epoch()
        for hook in hooks.on_train_epoch_end_monitors:
            hook()
        state.pending = NOTHING
        metrics.send_epoch(
            metrics.finish_epoch(), state.x_axis(state.updates), state.epoch
        )  # values logged by the monitors
        if state.updates == 0 and not self.run.module.automatic_optimization:
            messages.warn_once(
                f"{type(self.run.module).__name__}.training_step did not step any of self.optimizers() in an entire "
                "epoch, so global_step does not change and no step metrics reach the loggers. Call "
                "self.optimizers().step() instead of the original optimizer's step()."
            )
        if complete:
            self.enter_next_epoch()

    def enter_next_epoch(self) -> None:
        """Advance the counters from a finished epoch to the next one."""
        state = self.state
        state.epoch, state.epoch_done, state.is_last_batch = state.epoch + 1, False, False
        state.batch_idx, state.next_batch = -1, 0

    def advise(self) -> None:
        """Report likely mistakes: a finished run, modules in eval mode, too few steps to log."""
        run = self.run
        if self.at_limit():
            self.say_finished()
            return
        asleep = sum(not module.training for module in run.module.modules())
        if asleep:
            messages.warn_once(
                f"{asleep} submodules of {type(run.module).__name__} are in eval mode at the start of the fit and "
                "will stay in eval mode. Call module.train() before fit, unless they are meant to be frozen."
            )
        updates = run.trainer.estimated_stepping_batches
        if run.trainer.loggers and not run.trainer.fast_dev_run and updates < run.trainer.log_every_n_steps < 2**62:
            messages.info_once(
                f"This fit runs {updates} optimizer steps, so with log_every_n_steps={run.trainer.log_every_n_steps} "
                "no step metrics reach the loggers. Lower log_every_n_steps to see them."
            )

    # ---- the end ---------------------------------------------------------------------------------------------------

    def leave_epoch(self, reason: Reason) -> bool:
        """Return True if the epoch's last batch is done; if it is not and ``reason`` is a signal, end the run."""
        if reason == "signal" and not self.state.is_last_batch:
            raise self.stops.by_signal()
        return self.state.is_last_batch

    def finished(self) -> bool:
        """Return True if training is over; called between epochs."""
        if self.at_limit():
            return True
        reason = self.stops.here()
        if reason == "signal":
            raise self.stops.by_signal()
        return bool(reason)

    def at_limit(self) -> bool:
        """Return True if ``max_epochs`` or ``max_steps`` has been reached."""
        run, state = self.run, self.state
        epochs = state.epoch + state.epoch_done
        return state.global_step >= limit(run.trainer.max_steps) or epochs >= limit(run.trainer.max_epochs)

    def say_finished(self) -> None:
        """Report that there is nothing to train, why, and how to change that."""
        run, state = self.run, self.state
        if run.trainer.limit_train_batches == 0:
            messages.info_once("Nothing to train: limit_train_batches=0.", key="nothing to train")
            return
        epochs = state.epoch + state.epoch_done
        made = {"max_epochs": epochs, "max_steps": state.global_step}
        reached = [name for name, number in made.items() if number >= limit(getattr(run.trainer, name))]
        advice = f" Raise {' and '.join(reached)} to continue." if reached else ""
        messages.info_once(
            f"Nothing to train: the run has completed {epochs} epoch{'s' * (epochs != 1)} and {state.global_step} "
            f"steps, and the limits are max_epochs={run.trainer.max_epochs} and "
            f"max_steps={run.trainer.max_steps}.{advice}",
            key="nothing to train",
        )

    def check_length(self, seen: int, batches: Any) -> bool:
        """Raise if the loader ended too early; report batches left over because another rank's loader was shorter.

        Always returns True, because the epoch is complete.
        """
        if getattr(batches, "left_over", False):
            messages.info_anywhere(
                f"Rank {self.run.strategy.global_rank} had batches left when another rank's train_dataloader ended "
                f"after {seen} batches in epoch {self.state.epoch}. They are skipped so that no rank waits."
            )
        if seen == 0:
            self.refuse_empty(
                f"The train_dataloader yielded no batch in epoch {self.state.epoch}. A generator can be read only "
                "once, so pass a DataLoader, a list, or an object whose __iter__ starts over."
            )
        if seen < self.run.source.num_training_batches and self.run.source.length_known():
            raise RuntimeError(self.length_lie(f"only {seen}"))
        return True

    def refuse_empty(self, why: str) -> None:
        """Raise an error for an epoch without batches."""
        raise RuntimeError(why)

    def length_lie(self, seen: str) -> str:
        """Return the error for a loader that yields more or fewer batches than its length."""
        return (
            f"The train_dataloader has a length of {self.run.source.num_training_batches} batches, but yielded {seen} "
            f"in epoch {self.state.epoch}. Windows, validation and schedules are planned from the length, so correct "
            "__len__, or remove it so that Paceline looks one batch ahead instead."
        )


def limit(value: int | None) -> float:
    """Return a limit as a number to compare with; -1 and None (no limit) become inf."""
    return float("inf") if value in (-1, None) else float(value)  # type: ignore[arg-type]
