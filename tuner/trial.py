"""Train or evaluate a run on a few batches, without validation, logging or saving."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from ..trainer import phases
from ..trainer.evaluation import EvalLoop
from ..trainer.loop import FitLoop
from ..trainer.lr_schedules import Schedules
from ..trainer.states import RunningStage
from ..trainer.stopping import Reason, Stops

if TYPE_CHECKING:
    from ..trainer.run import Run

Method = Literal["fit", "validate", "test", "predict"]


def train(run: Run, before: Callable[[], Any], after: Callable[[list[Tensor]], bool]) -> None:
    """Train with the run's own step until ``after`` returns True, over several epochs if necessary.

    Args:
        run: the trial's run (see :func:`.trial_run.trial_in_run`).
        before: called before each accumulation window.
        after: called after each window with the losses of its batches (tensors of shape ()); returns True to stop.
    """
    run.stops = _NoStops(run, {})
    run.state.stage = RunningStage.TRAINING
    run.source.train()
    if run.source.num_training_batches == 0:
        raise ValueError("limit_train_batches=0 leaves no batches to train on. Leave out limit_train_batches.")
    loop = _TrialLoop(run, before, after)
    loop.bind()
    run.metrics.enter(phases.ON_TRAIN_START)
    for hook in run.hooks.on_train_start:
        hook()
    with suppress(_EndOfTrial):
        while True:
            loop.run_epoch(0)


def evaluate(run: Run, kind: Literal["validate", "test", "predict"]) -> None:
    """Evaluate on the batches that the trial's Trainer allows, without hooks."""
    run.stops = _NoStops(run, {})
    run.state.stage = RunningStage(kind)
    _TrialEvaluation(run, kind).evaluate()


class _EndOfTrial(Exception):  # noqa: N818 - not an error
    """Ends a trial's training."""


class _NoStops(Stops):
    """Ignores requests to stop."""

    def at(self, boundary: int) -> Reason:
        return ""


class _TrialLoop(FitLoop):
    """A fit's loop, but without limits, schedulers, validation, logging and end-of-epoch work."""

    def __init__(self, run: Run, before: Callable[[], Any], after: Callable[[list[Tensor]], bool]) -> None:
        super().__init__(run, None)
        self._before, self._after = before, after
        self._losses: list[Tensor] = []
        hooks = run.hooks
        vars(hooks).update(
            on_train_batch_start=(self._start_batch, *hooks.on_train_batch_start),
            on_train_batch_end=(*hooks.on_train_batch_end, self._end_batch),
        )

    def _start_batch(self, batch: Any, batch_idx: int) -> None:
        if not self.state.window:
            self._losses = []
            self._before()

    def _end_batch(self, outputs: dict[str, Any] | None, batch: Any, batch_idx: int) -> None:
        loss = None if outputs is None else outputs.get("loss")
        self._losses += [loss] if isinstance(loss, Tensor) else []
        if not self.state.window and self._after(self._losses):
            raise _EndOfTrial

    def plan_epoch(self) -> None:
        self.schedules = Schedules(self.run, [])
        self.max_steps = self.log_every = float("inf")

    def at_limit(self) -> bool:
        return False

    def end_epoch(self, complete: bool, outputs: Any) -> None:
        if self.state.next_batch == 0:  # a hook skipped all batches
            self.check_length(0, None)
        self.enter_next_epoch()


class _TrialEvaluation(EvalLoop):
    """An evaluation without hooks, in which other ranks could wait for a rank that has run out of memory."""

    def hooks(self, moment: str) -> tuple[Callable[..., Any], ...]:
        return ()

    def started(self) -> bool:
        return False
