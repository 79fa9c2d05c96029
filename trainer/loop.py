"""The loop over epochs and batches. ``callbacks/base.py`` shows the order of its hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .. import messages
from ..data.batches import Batches, StepIterator
from ..data.loaders import seed_shuffling, what_fetching_changes
from ..processes.seed import host_random_states, mixed
from . import phases
from .bind_steps import bind_mover, bind_step, takes_iterator
from .compiled_step import compiled_whole
from .loss import LossReader, LossWatch
from .lr_schedules import Schedules
from .manual_step_check import ManualStepCheck
from .state import Pending
from .states import RunningStage
from .step import IteratorStep, ManualStep, WeightedStep, choose_step, detached, without_repeated_items
from .validation import Validation

if TYPE_CHECKING:
    from .resume import Repeats, Resumed
    from .run import Run
    from .stopping import Reason


#: Read once, because looking up an enum's members is slow.
NOTHING, SCHEDULERS, LOGGING, PLATEAUS = Pending.NOTHING, Pending.SCHEDULERS, Pending.LOGGING, Pending.PLATEAUS
EPOCH_VALUES, TRAIN_END = Pending.EPOCH_VALUES, Pending.TRAIN_END


class FitLoop:
    """Runs one fit. Everything that depends on the configuration is bound before the first batch.

    Args:
        run: the prepared run, with its module set up.
        resumed: this rank's state in the checkpoint that this fit resumes from; None in a new fit, or once all of it
            has been restored.

    Attributes:
        validation: decides when validations are due, and runs them.
        takes_iterator: whether the step has the form ``training_step(dataloader_iter)``.
        guarded: whether a callback makes all ranks skip the same batches, as ``LossGuard`` does.
        stops: decides, for all ranks together, after which batch a run stops early.
        losses: reads the loss from what ``training_step`` returned.
        manual_step_check: raises if the user's code steps an optimizer that the trainer steps too.
        forward: ``training_step`` as the strategy runs it, called with ``(batch, batch_idx)``.
        whole: compiles forward, backward and update as one graph; None unless ``Trainer(compile=...)`` requests it.
        schedules: the learning rate schedulers, grouped by when they advance.
        max_steps: the number of optimizer steps at which training ends; inf means no limit.
        log_every: the number of optimizer steps between two transfers of logged values to the loggers.
        at_epoch_start: the host's RNG states when the first batch of the current epoch was requested.
    """

    schedules: Schedules
    max_steps: float
    log_every: float

    def __init__(self, run: Run, resumed: Resumed | None) -> None:
        self.run, self.state = run, run.state
        self.hooks, self.metrics, self.stops = run.hooks, run.metrics, run.stops
        self.profiler = run.trainer.profiler
        self.resumed = resumed
        self.validation = Validation(run)
        self.validate = self.profiler.around("run_validation", self.validation.validate)
        self.takes_iterator = takes_iterator(run.module.training_step)
        self.guarded = any(callback.skips_together for callback in run.trainer.callbacks)
        self.losses = LossReader(run.module, run.strategy, together=self.guarded)
        self.manual_step_check = ManualStepCheck(run)
        self.repeats: Repeats | None = None
        self.at_epoch_start: dict[str, Any] | None = None
        self._fetched: Batches | None = None
        run.fit = self

    def train(self) -> None:
        """Train until a limit is reached, a stop is requested, or an exception ends the run."""
        run, state, metrics = self.run, self.state, self.metrics
        if self.resumed is None:
            self.validation.sanity_check()
        pending = self.pending_work()
        if state.epoch_done and pending is not EPOCH_VALUES:
            self.enter_next_epoch()
        if run.trainer.limit_train_batches == 0 or (self.finished() and pending is NOTHING):
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
        if self.resumed is not None and (pending in (EPOCH_VALUES, TRAIN_END) or state.next_batch == 0):
            self.resumed.restore()
        run_epoch = self.profiler.around("run_training_epoch", self.run_epoch)
        if pending is EPOCH_VALUES:
            self.finish_epoch()
        elif pending not in (NOTHING, TRAIN_END):
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

    def pending_work(self) -> Pending:
        """Return the checkpoint's pending work, which must be carried out even if a limit has been reached.

        If there is more to train, pending work for the end of training or of an incomplete epoch is dropped.
        """
        state = self.state
        cut_short = state.pending is EPOCH_VALUES and not state.epoch_done
        ends = state.pending is TRAIN_END or cut_short
        if self.resumed is None or (ends and not self.at_limit()):
            state.pending = NOTHING
        return state.pending

    def train_nothing(self) -> None:
        """Report that there is nothing to train; restore the state, so that a new checkpoint equals the loaded one."""
        self.report_finished()
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
        """Run one pass over the training data, starting at batch ``start_batch``.

        A batch goes through the ``on_train_batch_start`` hooks; the step, which runs forward and backward and, on the
        last micro-batch of an accumulation window, the optimizer; the learning rate schedulers; the
        ``on_train_batch_end`` hooks; and :meth:`after_hooks`. A checkpoint can be saved anywhere in between, so
        ``state.pending`` always records the work that a run resumed from that checkpoint does first.
        """
        run, state, metrics, stops = self.run, self.state, self.metrics, self.stops
        self.start_epoch()
        self.plan_epoch()
        step, batches = self.step(), self.batches(start_batch)
        run_step = self.profiler.around("run_training_batch", step)  # `step` itself if nothing is profiled
        num_batches = run.source.num_training_batches  # inf if the loader has no length
        schedules, max_steps, log_every = self.schedules, self.max_steps, self.log_every
        every_batch = self.validation.every is not None or bool(schedules.step_plateaus)
        # Here the ranks reduce values of self.log(..., on_step=True, sync_dist=True); `active` only if there are any.
        step_values, hook_values = metrics.step_value_sharings()
        batch_idx, complete, outputs = start_batch - 1, False, None
        with closing(batches):
            iterator = self.start_fetching(batches, start_batch)  # a resumed run first finishes the saved batch
            batch_starts, batch_ends = self.batch_hooks()  # tuples of bound methods
            already_over = self.at_limit() or stops.here() == "asked"
            for batch in () if already_over else iterator:
                batch_idx += 1
                if batch_idx >= num_batches:
                    raise RuntimeError(self.wrong_length(f"at least {batch_idx + 1}"))
                state.batch_idx, state.stepped = batch_idx, False
                state.is_last_batch = batch_idx + 1 == num_batches or batches.exhausted
                metrics.batch = batch  # its size is the weight of the logged values
                # A hook that returns -1 skips the rest of the epoch, including this batch; the other hooks still run.
                if batch_starts and batch is not None and -1 in [hook(batch, batch_idx) for hook in batch_starts]:
                    self.skip_rest(step)
                    complete = True
                    break
                outputs = run_step(batch, batch_idx)  # sets state.stepped if an optimizer stepped
                if step_values.active:
                    step_values.share(weight=state.share)
                state.batches += 1
                state.next_batch, state.pending = batch_idx + 1, SCHEDULERS
                if not state.window:  # no gradients wait for the next optimizer step
                    state.settled = state.batches
                if schedules.per_batch:
                    schedules.after_batch()
                state.pending = LOGGING
                if batch_ends:
                    outputs = detached(outputs)
                    for hook in batch_ends:
                        hook(outputs, batch, batch_idx)
                if hook_values.active:
                    hook_values.share(weight=state.share)
                # All ranks stop after the same batch. They agree on it in `at` once any of them has been asked to stop.
                if state.stop_requested:
                    reason = stops.here()
                else:
                    state.boundaries += 1
                    reason = stops.at(state.boundaries) if state.stop_requested else ""
                if every_batch or reason or (state.stepped and state.updates % log_every == 0):
                    reason = self.after_hooks(reason, outputs)
                else:
                    state.pending = NOTHING
                if state.window:
                    continue  # training never stops inside a window
                if reason or state.global_step >= max_steps:
                    complete = state.is_last_batch
                    if reason == "signal" and not complete:
                        raise stops.by_signal()  # after saving a checkpoint
                    break
            else:
                complete = state.is_last_batch if already_over else self.check_length(batch_idx + 1, batches)
        self.end_epoch(complete, outputs)

    def forward_pass(self) -> None:
        """Run ``training_step`` on one epoch of batches, without gradients, updates, hooks or logging."""
        metrics = self.metrics
        before = metrics.enter(phases.TRAIN_BATCH)
        with torch.no_grad(), metrics.muted(self.run.module), closing(self.batches(0)) as batches:
            for batch_idx, batch in enumerate(batches):
                metrics.batch = batch
                self.forward(batch, batch_idx)
        metrics.back(before)

    # ---- the parts of an epoch -------------------------------------------------------------------------------------

    def start_epoch(self) -> None:
        """Call the epoch-start hooks before the epoch's first batch is fetched."""
        self.manual_step_check.unwatch()  # until the epoch's step is created
        self.run.source.reload_if_due()  # reload_dataloaders_every_n_epochs
        self.metrics.enter(phases.ON_TRAIN_EPOCH_START)  # tells self.log where it is called from
        for hook in self.hooks.on_train_epoch_start:
            hook()
        self.run.strategy.check_parameters(self.run.module)
        self.run.strategy.check_replicas(self.run.module)
        self.metrics.enter(phases.TRAIN_BATCH)

    def plan_epoch(self) -> None:
        """Read the settings that callbacks may change between epochs, and plan this epoch's validations."""
        run = self.run
        self.schedules = Schedules(run, run.lr_scheduler_configs)
        self.max_steps = limit(run.trainer.max_steps)
        self.log_every = run.trainer.log_every_n_steps
        self.validation.plan_epoch()

    def batch_hooks(self) -> tuple[tuple[Callable[..., Any], ...], tuple[Callable[..., Any], ...]]:
        """Return the hooks at a batch's start and end.

        If the step fetches its batches itself, the hooks get the most recently fetched batch (None at first) and its
        index.
        """
        starts, ends = self.hooks.on_train_batch_start, self.hooks.on_train_batch_end
        if self.takes_iterator:
            starts = tuple(partial(_with_last_batch, hook) for hook in starts)
            ends = tuple(partial(_with_last_batch_and_outputs, hook) for hook in ends)
        return starts if self.repeats is None else (self.forget_repeats, *starts), ends

    def forget_repeats(self, batch: Any, batch_idx: float) -> None:
        """Discard the values that repeated batches have logged, once the resumed run has repeated all of them.

        The epoch's restored values already contain these batches.
        """
        if self.repeats is not None and batch_idx >= self.repeats.until:
            self.repeats.forget()
            self.repeats = None

    def step(self) -> ManualStep:
        """Create the epoch's step, because callbacks may have changed the optimizers or the accumulation."""
        if self.whole is not None:
            return self.whole.step(self.losses)
        source = self.run.source
        weighs = source.known_share != 1.0
        step = choose_step(
            self.run,
            without_repeated_items(self.run, self.forward) if weighs else self.forward,
            self.losses,
            self.manual_step_check,
        )
        if weighs:
            step = WeightedStep(step, each=source.ends_separately and not self.takes_iterator)
        return IteratorStep(step) if self.takes_iterator else step

    def batches(self, start_batch: int) -> Any:
        """Return the epoch's batches on the device, in an order that depends only on the seed and the epoch."""
        run, state, source = self.run, self.state, self.run.source
        loader = source.train_loader
        seed_shuffling(loader, state.shuffle_seed, state.epoch)
        lookahead = source.looks_ahead(loader) or self.takes_iterator
        # In a resumed run, a loader with a saved position continues there; any other loader skips batches.
        resumed = self.resumed
        # After the epoch's last fetch, the loader's generators already have their state for the next epoch.
        ended = resumed is not None and start_batch > 0 and (resumed.ended or start_batch >= source.cut())
        knows_position = resumed is not None and resumed.load_loader(loader, mid_epoch=start_batch > 0 and not ended)
        skip = 0 if knows_position and not ended else start_batch
        found = self._fetched = Batches(
            loader,
            move=bind_mover(run, 0),
            lookahead=lookahead,
            limit=skip if ended else source.cut() - (start_batch - skip),  # `cut` is inf unless there is a limit
            skip=skip,
            agree=source.batch_agreement(),  # for loaders without a length: all ranks end after the same batch
            seed=mixed(state.shuffle_seed, state.epoch, run.strategy.data_rank),
            remember=what_fetching_changes(loader) if lookahead else None,
            prepare=None if resumed is None or not start_batch else resumed.before_fetch,
        )
        return StepIterator(found, start_batch, self.metrics) if self.takes_iterator else found

    def start_fetching(self, batches: Any, start_batch: int) -> Iterator[Any]:
        """Return the batch iterator. If batches are prefetched, this also fetches the first batch.

        In a resumed fit, this also restores the saved run's state, and does the work that was still pending for the
        last batch before the save.
        """
        resumed = self.resumed if start_batch > 0 else None
        if resumed is not None:
            resumed.enter_epoch()
        self.at_epoch_start = host_random_states()
        name = "[_TrainingEpochLoop].train_dataloader_next"
        iterator = self.profiler.iterate(name, self.profiler.around(name, iter)(batches))
        if resumed is not None:
            resumed.restore()
        self.repeats = None if self.resumed is None else self.resumed.repeats()
        if resumed is not None:
            self.finish_batch()
        self.resumed = None
        return iterator

    def position_in_data(self) -> dict[str, Any]:
        """Return this rank's position in the data for a checkpoint.

        If the next batch has already been prefetched, the position is before that batch, and a resumed run fetches it
        again.
        """
        if self.resumed is not None:
            return self.resumed.position_in_data()
        batches = None if self.state.epoch_done else self._fetched
        ended = batches is not None and batches.exhausted
        ahead = {} if batches is None or ended else batches.before_ahead or {}
        return {
            "random_at_epoch_start": self.at_epoch_start,
            "ended": ended,
            "random_before_fetch": ahead.get("random"),
            "loader": ahead.get("loader"),
        }

    def after_hooks(self, reason: Reason, outputs: Any = None) -> Reason:
        """Do the work that is due after a batch's last hooks: logging, validation and plateau schedulers.

        After a resume, do only the work that the saved run had not done yet.

        ``reason`` is why the run stops after this batch; an empty string if it does not stop. Return ``reason``, or a
        new reason from validation.
        """
        state, validation, schedules = self.state, self.validation, self.schedules
        if state.pending is LOGGING and state.stepped and (state.updates % self.log_every == 0 or reason == "asked"):
            self.metrics.flush_step(state.x_axis(state.updates), state.epoch, outputs)
        if state.pending is not PLATEAUS and validation.every is not None and validation.due(state.batch_idx, reason):
            reason = self.validate()
        if schedules.step_plateaus and state.stepped:
            schedules.advance(schedules.step_plateaus, schedules.steps())
        state.pending = NOTHING
        return reason

    def finish_batch(self) -> None:
        """Do the work that is still pending for the last batch, such as schedulers and logging."""
        state = self.state
        if state.pending is SCHEDULERS:
            self.schedules.after_batch()
            state.pending = LOGGING
        if state.pending is LOGGING and self.resumed is not None and self.resumed.values_wait:
            hook_values = self.metrics.step_value_sharings()[1]
            hook_values.share(weight=state.share)
        if state.pending is not NOTHING:
            self.after_hooks("")

    def skip_rest(self, step: ManualStep) -> None:
        """Complete the window and the end-of-batch work of an epoch whose remaining batches a hook skipped."""
        state, validation = self.state, self.validation
        step.finish_window()
        state.is_last_batch, state.pending, validation.every = True, SCHEDULERS, None
        self.finish_batch()

    def finish_epoch(self) -> None:
        """Finish the epoch after resuming from a checkpoint that was written in ``on_train_epoch_end``."""
        self.metrics.enter(phases.ON_TRAIN_EPOCH_END)
        self.metrics.end_epoch()
        self.schedules = Schedules(self.run, self.run.lr_scheduler_configs)
        self.close_epoch(complete=self.state.epoch_done)

    def end_epoch(self, complete: bool, outputs: Any) -> None:
        """Do the end-of-epoch work. If the epoch is not ``complete``, a later fit continues it."""
        state, hooks, metrics = self.state, self.hooks, self.metrics
        self.forget_repeats(None, math.inf)
        state.epoch_done, state.pending, state.share = complete, EPOCH_VALUES, 1.0
        metrics.enter(phases.ON_TRAIN_EPOCH_END)
        metrics.end_epoch()
        for hook in hooks.on_train_epoch_end:
            hook()
        self.close_epoch(complete, outputs)

    def close_epoch(self, complete: bool, outputs: Any = None) -> None:
        """Do the work that follows the ``on_train_epoch_end`` hooks."""
        state, hooks, metrics, schedules = self.state, self.hooks, self.metrics, self.schedules
        results = metrics.finish_epoch()
        if complete and schedules.epoch_plateaus:
            schedules.advance(schedules.epoch_plateaus, state.epoch + 1)
        metrics.send_epoch(results)
        metrics.check_losses(outputs)
        state.pending = TRAIN_END
        metrics.end_epoch()
        for hook in hooks.on_train_epoch_end_monitors:
            hook()
        state.pending = NOTHING
        metrics.send_epoch(metrics.finish_epoch())  # values logged by the monitors
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
            self.report_finished()
            return
        asleep = sum(not module.training for module in run.module.modules())
        if asleep:
            messages.warn_once(
                f"{type(run.module).__name__} starts the fit with {asleep} submodule{'s' * (asleep != 1)} in eval "
                "mode, and the fit does not change that. Call module.train() before fit, unless eval mode is intended."
            )
        updates = run.trainer.estimated_stepping_batches
        if run.trainer.loggers and not run.trainer.fast_dev_run and updates < run.trainer.log_every_n_steps < 2**62:
            messages.info_once(
                f"This fit runs {updates} optimizer step{'s' * (updates != 1)}, so with "
                f"log_every_n_steps={run.trainer.log_every_n_steps} no step metrics reach the loggers. Lower "
                "log_every_n_steps to see them."
            )

    # ---- the end ---------------------------------------------------------------------------------------------------

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

    def report_finished(self) -> None:
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
            f"step{'s' * (state.global_step != 1)}, and the limits are max_epochs={run.trainer.max_epochs} and "
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
                f"after {seen} batch{'es' * (seen != 1)} in epoch {self.state.epoch}. These batches are skipped, so "
                "that no rank waits."
            )
        if seen == 0:
            self.refuse_empty(
                f"The train_dataloader yielded no batches in epoch {self.state.epoch}. A generator can be read only "
                "once, so pass a DataLoader, a list, or an object whose __iter__ starts over."
            )
        if seen < self.run.source.num_training_batches and self.run.source.length_known():
            raise RuntimeError(self.wrong_length(f"only {seen}"))
        return True

    def refuse_empty(self, why: str) -> None:
        """Raise an error for an epoch without batches."""
        raise RuntimeError(why)

    def wrong_length(self, seen: str) -> str:
        """Return the error text for a loader that yields more or fewer batches than its length says."""
        return (
            f"The train_dataloader has length {self.run.source.num_training_batches}, but yielded {seen} "
            f"batch{'es' * (seen != 'only 1')} in epoch {self.state.epoch}. Accumulation windows, validation and "
            "schedules rely on the length, so correct __len__, or remove it so that Paceline looks one batch ahead "
            "instead."
        )


def limit(value: int | None) -> float:
    """Return a limit as a number to compare with; -1 and None (no limit) become inf."""
    return float("inf") if value in (-1, None) else float(value)  # type: ignore[arg-type]


def _with_last_batch(hook: Callable[..., Any], batches: StepIterator, batch_idx: int) -> Any:
    return hook(*batches.last[:2])


def _with_last_batch_and_outputs(hook: Callable[..., Any], outputs: Any, batches: StepIterator, batch_idx: int) -> Any:
    return hook(outputs, *batches.last[:2])
