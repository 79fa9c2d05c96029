"""Validation inside a fit: the sanity check before training, and when each validation is due."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..processes.seed import isolate_rng, random_states
from ..processes.timings import phase
from . import phases
from .evaluation import EvalLoop
from .state import Pending
from .states import RunningStage

if TYPE_CHECKING:
    from .run import Run
    from .stopping import Reason


class Validation:
    """Runs the validations of one fit when they are due.

    Attributes:
        every: batches between validations in the current epoch; inf means after the epoch's last batch, and None means
            no validation.
        random: the RNG states at the start of the current validation.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.loop = EvalLoop(run, "validate")
        self.every: int | float | None = None
        self.last = time.monotonic()
        self.random: dict[str, Any] | None = None

    def comes(self) -> bool:
        """Return True if validation will run in any remaining epoch of this fit."""
        run, state = self.run, self.run.state
        if not run.source.validates() or run.trainer.limit_train_batches == 0:
            return False
        every, ended = run.trainer.check_val_every_n_epoch or 1, state.epoch + state.epoch_done
        return run.trainer.max_epochs in (None, -1) or (ended // every + 1) * every <= run.trainer.max_epochs

    def sanity_check(self) -> None:
        """Run a few validation batches before training, without changing metrics or RNG states."""
        run, hooks, metrics = self.run, self.run.hooks, self.run.metrics
        if not self.comes() or run.trainer.num_sanity_val_steps == 0:
            return
        run.state.stage = RunningStage.SANITY_CHECKING
        with isolate_rng():
            metrics.enter(phases.SANITY_HOOK)
            for hook in hooks.on_sanity_check_start:
                hook()
            self.loop.evaluate()
            metrics.enter(phases.SANITY_HOOK)
            for hook in hooks.on_sanity_check_end:
                hook()
        metrics.discard()

    def plan_epoch(self) -> None:
        """Set how often to validate during this epoch."""
        run = self.run
        epochs = run.trainer.check_val_every_n_epoch
        skipped = epochs is not None and (run.state.epoch + 1) % epochs != 0
        self.every = None if skipped or not run.source.validates() else run.source.val_check_batch()

    def due(self, batch_idx: int, reason: Reason) -> bool:
        """Return True if validation is due after this batch.

        ``reason`` is why the run stops after this batch; an empty string if it does not stop.
        """
        run, state = self.run, self.run.state
        if run.trainer.val_check_seconds is not None:
            late = time.monotonic() - self.last >= run.trainer.val_check_seconds
            return run.strategy.agree(late)  # clocks differ, so this takes a host message per batch
        if reason == "asked" and not state.window:
            return True
        if self.every == float("inf") or self.every is None:
            return state.is_last_batch
        done = state.batches if run.trainer.check_val_every_n_epoch is None else batch_idx + 1
        return done % self.every == 0

    @phase("validation")
    def validate(self) -> Reason:
        """Validate during a fit; return the reason if the run should stop right afterward, else an empty string."""
        state, metrics = self.run.state, self.run.metrics
        metrics.drain()
        self.random, state.pending = random_states(), Pending.VALIDATION
        state.stage = RunningStage.VALIDATING
        self.loop.evaluate(zero_grad=state.window == 0)
        state.stage = RunningStage.TRAINING
        self.last = time.monotonic()
        metrics.enter(phases.TRAIN_BATCH)
        return self.run.stops.here()
