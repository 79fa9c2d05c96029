"""Where a run stands: the only counters there are."""

from __future__ import annotations

from enum import Enum
from typing import Any

from .states import RunningStage, TrainerFn, TrainerStatus


class Pending(str, Enum):
    """What follows a batch or an epoch and has not been done yet. A checkpoint holds it; a resume does it first.

    The order of the members is the order in which a fit does these things.
    """

    #: Nothing: the next batch can be trained on.
    NOTHING = ""
    #: Everything that follows a batch: schedulers, logging, validation, plateau schedulers.
    SCHEDULERS = "schedulers"
    #: The same from logging on.
    LOGGING = "batch"
    #: The same from the validation on, which had begun.
    VALIDATION = "validation"
    #: The same from the plateau schedulers on.
    PLATEAUS = "plateaus"
    #: What follows ``on_train_epoch_end``.
    EPOCH_VALUES = "values"
    #: The end of the training, if that was its last epoch.
    TRAIN_END = "end"




class RunState:
    """What a run has done so far. The loop writes it, everybody reads it, a checkpoint holds it.

    Attributes:
        epoch: the training epoch under way (0-based); equals the number of epochs finished between epochs.
        global_step: optimizer steps made, over all optimizers; a step that fp16 skipped does not count.
        updates: training batches that ended in a step of at least one optimizer; the x axis of the logs.
        batches: training batches trained on, over all epochs.
        batch_idx: index of the training batch under way in its epoch (0-based); -1 before the first.
        window: micro-batches whose gradients wait for the next optimizer step.
        next_batch: the first batch of the epoch that has not been trained on; still ``batch_idx`` when a step fails.
        settled: ``batches`` without those whose gradients wait in the window.
        pending: what a resume from here has to do before the next batch.
        epoch_done: the epoch's last batch has been trained (true inside ``on_train_epoch_end``).
        is_last_batch: the batch under way is the last of its epoch.
        stepped: the batch under way ended in an optimizer step.
        evaluated: batches of evaluations begun in this run, of all kinds and loaders.
        should_stop: somebody asked the training to stop (respected after ``min_epochs`` and ``min_steps``).
        signum: the signal that asked the run to end at the next step boundary, or 0.
        stop: there may be a reason to stop, here or in another process: the loop looks before it goes on.
        passed: boundaries of this run at which it went on (see :mod:`..strategies.stopping`).
        saving: a checkpoint is being written because a signal ends the run.
        shuffle_seed: what shuffling is computed from, together with the epoch.
    """

    __slots__ = (
        "_fn",
        "_stage",
        "_status",
        "batch_idx",
        "batches",
        "epoch",
        "epoch_done",
        "evaluated",
        "global_step",
        "is_last_batch",
        "next_batch",
        "passed",
        "pending",
        "saving",
        "settled",
        "should_stop",
        "shuffle_seed",
        "signum",
        "stepped",
        "stop",
        "updates",
        "window",
    )

    #: The counters that a checkpoint holds.
    SAVED = (
        "epoch",
        "global_step",
        "updates",
        "batches",
        "settled",
        "window",
        "next_batch",
        "pending",
        "stepped",
        "is_last_batch",
        "epoch_done",
        "shuffle_seed",
    )

    def __init__(self) -> None:
        self._fn: TrainerFn | None = None
        self._stage: RunningStage | None = None
        self._status = TrainerStatus.INITIALIZING
        self.signum = 0
        self.should_stop = self.stop = self.saving = False
        self.passed = self.evaluated = 0
        self.shuffle_seed = 0
        self.epoch = 0
        self.global_step = 0
        self.updates = 0
        self.batches = 0
        self.batch_idx = -1
        self.window = 0
        self.next_batch = 0
        self.settled = 0
        self.pending = Pending.NOTHING
        self.epoch_done = False
        self.is_last_batch = False
        self.stepped = False

    @property
    def fn(self) -> TrainerFn | None:
        """The entry point that is running, or None between runs."""
        return self._fn

    @fn.setter
    def fn(self, fn: str | None) -> None:
        self._fn = None if fn is None else TrainerFn(fn)

    @property
    def stage(self) -> RunningStage | None:
        """What that entry point is doing just now, or None."""
        return self._stage

    @stage.setter
    def stage(self, stage: str | None) -> None:
        self._stage = None if stage is None else RunningStage(stage)

    @property
    def status(self) -> TrainerStatus:
        """How far the run has come."""
        return self._status

    @status.setter
    def status(self, status: str) -> None:
        self._status = TrainerStatus(status)

    def begin(self, fn: str) -> None:
        """A run begins: nobody has asked it to stop."""
        self.fn, self.stage, self.status = fn, None, TrainerStatus.RUNNING
        self.signum = self.passed = self.evaluated = 0
        self.should_stop = self.stop = self.saving = False

    @property
    def finished(self) -> bool:
        """The run came to its end."""
        return self.status is TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """The run ended, at its end or by an exception or signal."""
        return self.status.stopped

    def where(self) -> str:
        """What the run is doing, in words: ``train, epoch 0, batch 3, step 3``; empty between runs."""
        if self.stage == "train":
            return f"train, epoch {self.epoch}, batch {self.batch_idx}, step {self.global_step}"
        if self.stage is None:
            return self.fn or ""
        return f"{self.stage}, step {self.global_step}" if self.fn == "fit" else self.stage

    @property
    def step_failed(self) -> bool:
        """The batch under way was begun and not trained on, so that gradients in the window may be its own."""
        return self.next_batch <= self.batch_idx

    def state_dict(self) -> dict[str, Any]:
        """The counters as plain data."""
        return {name: getattr(self, name) for name in self.SAVED} | {"pending": self.pending.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the counters of :meth:`state_dict`."""
        for name in self.SAVED:
            setattr(self, name, state[name])
        self.pending = Pending(state["pending"])
        self.batch_idx = self.next_batch - 1

    def drop_window(self) -> None:
        """Go back to where the accumulation window began."""
        self.load_state_dict(without_window(self.state_dict()))


def without_window(progress: dict[str, Any]) -> dict[str, Any]:
    """Counters (of :meth:`RunState.state_dict`) as they were before the accumulation window under way."""
    waiting = progress["batches"] - progress["settled"]
    if not waiting and not progress["window"]:
        return progress
    back = {"next_batch": progress["next_batch"] - waiting, "batches": progress["settled"]}
    return progress | back | {"window": 0, "pending": "", "stepped": False, "is_last_batch": False}
