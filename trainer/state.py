"""The counters of a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from .states import RunningStage, TrainerFn, TrainerStatus


class Pending(str, Enum):
    """The kinds of work after a batch or an epoch, in order. A resumed run first does the work that was pending."""

    NOTHING = ""  # the next batch can be trained on
    SCHEDULERS = "schedulers"  # everything that follows a batch: schedulers, logging, validation, plateau schedulers
    LOGGING = "batch"  # the same, starting with logging
    VALIDATION = "validation"  # the same, starting with the validation, which had already begun
    PLATEAUS = "plateaus"  # the same, starting with the plateau schedulers
    EPOCH_VALUES = "values"  # the work after ``on_train_epoch_end``
    TRAIN_END = "end"  # the end of training, if this was the last epoch


@dataclass(slots=True, eq=False)
class RunState:
    """The progress of a run. The loop updates it, other code reads it, and checkpoints store it.

    Attributes:
        fn: the entry point that is running, or None between runs.
        stage: what that entry point is doing now, or None.
        status: whether the run has started, and how it ended.
        epoch: the current training epoch (0-based); between epochs, the number of finished epochs.
        global_step: number of optimizer steps. Automatic optimization counts one step for all optimizers together, and
            manual optimization counts one for each. A step that fp16 skipped does not count.
        updates: training batches that ended in a step of at least one optimizer; the x axis of the logs.
        batches: batches trained on, across all epochs.
        settled: ``batches``, not counting batches whose gradients still wait for the optimizer step.
        window: micro-batches whose gradients wait for the next optimizer step.
        batch_idx: index of the current training batch in its epoch (0-based); -1 before the first batch.
        next_batch: index of the epoch's first batch that has not been trained on; equal to ``batch_idx`` if the current
            batch's step failed.
        pending: the work that a resumed run has to do before the next batch.
        stepped: whether the current batch ended in an optimizer step.
        is_last_batch: whether the current batch is the last of its epoch.
        share: weight of the current batch's mean on this rank: 1.0 if all ranks have the same number of samples, and
            0.0 if this rank's samples only repeat another rank's.
        epoch_done: whether the epoch's last batch has been trained on (true inside ``on_train_epoch_end``).
        shuffle_seed: the seed that, together with the epoch, determines the shuffling.
        signum: the signal that ends the run at the next step boundary, or 0.
        should_stop: whether a stop was requested (takes effect after ``min_epochs`` and ``min_steps``).
        stop_requested: whether there may be a reason to stop, in this or another process; if so, the loop checks before
            it continues.
        saving: whether a checkpoint is being written because a signal is ending the run.
        boundaries: number of boundaries that this run has passed (see :mod:`.stopping`).
        evaluated: number of evaluation batches started in this run, across all stages and loaders.
    """

    fn: TrainerFn | None = None
    stage: RunningStage | None = None
    status: TrainerStatus = TrainerStatus.INITIALIZING
    epoch: int = 0
    global_step: int = 0
    updates: int = 0
    batches: int = 0
    settled: int = 0
    window: int = 0
    batch_idx: int = -1
    next_batch: int = 0
    pending: Pending = Pending.NOTHING
    stepped: bool = False
    is_last_batch: bool = False
    share: float = 1.0
    epoch_done: bool = False
    shuffle_seed: int = 0
    signum: int = 0
    should_stop: bool = False
    stop_requested: bool = False
    saving: bool = False
    boundaries: int = 0
    evaluated: int = 0

    #: The counters that a checkpoint stores.
    SAVED: ClassVar[tuple[str, ...]] = (
        *("epoch", "global_step", "updates", "batches", "settled", "window", "next_batch"),
        *("pending", "stepped", "is_last_batch", "epoch_done", "shuffle_seed"),
    )

    def begin(self, fn: str) -> None:
        """Begin a run, and clear any earlier request to stop."""
        self.fn, self.stage, self.status = TrainerFn(fn), None, TrainerStatus.RUNNING
        self.signum = self.boundaries = self.evaluated = 0
        self.should_stop = self.stop_requested = self.saving = False
        self.share = 1.0

    def x_axis(self, updates: int) -> int:
        """Return the loggers' position on the x axis for values logged after ``updates`` updates."""
        return updates

    @property
    def finished(self) -> bool:
        """Whether the run ended normally."""
        return self.status is TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether the run ended, normally or because of an exception or signal."""
        return self.status.stopped

    def where(self) -> str:
        """Return what the run is doing, in words: ``train, epoch 0, batch 3, step 3``; an empty string between runs."""
        if self.stage == "train":
            return f"train, epoch {self.epoch}, batch {self.batch_idx}, step {self.global_step}"
        if self.stage is None:
            return self.fn or ""
        return f"{self.stage}, step {self.global_step}" if self.fn == "fit" else self.stage

    @property
    def step_failed(self) -> bool:
        """Whether the current batch failed before it was trained on; it may have left gradients in the window."""
        return self.next_batch <= self.batch_idx

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as plain data."""
        return {name: getattr(self, name) for name in self.SAVED} | {"pending": self.pending.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters from :meth:`state_dict`."""
        for name in self.SAVED:
            setattr(self, name, state[name])
        self.pending = Pending(state["pending"])
        self.batch_idx = self.next_batch - 1

    def drop_window(self) -> None:
        """Set the counters back to the beginning of the accumulation window."""
        self.load_state_dict(without_window(self.state_dict()))


def without_window(progress: dict[str, Any]) -> dict[str, Any]:
    """Return the counters in a :meth:`RunState.state_dict` as they were before the current accumulation window."""
    waiting = progress["batches"] - progress["settled"]
    if not waiting and not progress["window"]:
        return progress
    back = {"next_batch": progress["next_batch"] - waiting, "batches": progress["settled"]}
    return progress | back | {"window": 0, "pending": "", "stepped": False, "is_last_batch": False}
