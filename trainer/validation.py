"""Validation inside a fit: the sanity check before it, and when it is due."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..processes.seed import isolate_rng, random_states
from ..processes.timings import timed
from . import phases
from .evaluation import EvalLoop

if TYPE_CHECKING:
    from .stopping import Reason
    from .trainer import Trainer


class Validation:
    """The validations of one fit.

    Attributes:
        every: batches between two validations in the epoch under way; inf: after its last; None: none in this epoch.
        random: the random states in which the validation under way began.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.loop = EvalLoop(trainer, "validate")
        self.every: int | float | None = None
        self.last = time.monotonic()
        self.random: dict[str, Any] | None = None

    def comes(self) -> bool:
        """Whether an epoch that this fit may still train validates."""
        trainer, state = self.trainer, self.trainer.state
        if not trainer.enable_validation or trainer.limit_train_batches == 0:
            return False
        every, ended = trainer.check_val_every_n_epoch or 1, state.epoch + state.epoch_done
        return trainer.max_epochs in (None, -1) or (ended // every + 1) * every <= trainer.max_epochs

    def sanity_check(self) -> None:
        """Try a few validation batches ahead of training; leaves no trace in metrics or random states."""
        trainer, hooks, metrics = self.trainer, self.trainer._hooks, self.trainer._metrics
        if not self.comes() or trainer.num_sanity_val_steps == 0:
            return
        trainer.state.stage = "sanity_check"
        with isolate_rng():
            metrics.enter(phases.SANITY_HOOK)
            for hook in hooks.on_sanity_check_start:
                hook()
            self.loop.run()
            metrics.enter(phases.SANITY_HOOK)
            for hook in hooks.on_sanity_check_end:
                hook()
        metrics.discard()

    def plan_epoch(self) -> bool:
        """Decide when this epoch validates; False if it does not."""
        trainer = self.trainer
        epochs = trainer.check_val_every_n_epoch
        skipped = epochs is not None and (trainer.state.epoch + 1) % epochs != 0
        self.every = None if skipped or not trainer.enable_validation else trainer._source.val_check_batch()
        return self.every is not None

    def due(self, batch_idx: int, reason: Reason) -> bool:
        """Whether to validate after this batch. ``reason``: why it is the last one, if it is."""
        trainer, state = self.trainer, self.trainer.state
        if trainer.val_check_seconds is not None:
            late = time.monotonic() - self.last >= trainer.val_check_seconds
            return trainer.strategy.agree(late)  # each rank has its clock; one small message over the host a batch
        if reason == "asked" and not state.window:
            return True
        if self.every == float("inf") or self.every is None:
            return state.is_last_batch
        done = state.batches if trainer.check_val_every_n_epoch is None else batch_idx + 1
        return done % self.every == 0

    @timed("validation")
    def run(self) -> Reason:
        """A validation in the middle or at the end of an epoch, with a boundary behind it: why the run stops there."""
        state, metrics = self.trainer.state, self.trainer._metrics
        metrics.drain()
        self.random, state.pending = random_states(), "validation"
        state.stage = "validate"
        self.loop.run(zero_grad=state.window == 0)
        state.stage = "train"
        self.last = time.monotonic()
        metrics.enter(phases.TRAIN_BATCH)
        return self.trainer._stops.here()
