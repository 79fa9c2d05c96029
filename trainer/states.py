"""Enums for what a Trainer is doing. Each member compares equal to its string."""

from __future__ import annotations

from enum import Enum
from typing import Literal


class _Word(str, Enum):
    __hash__ = str.__hash__  # so that a plain string finds a member that is a dict key

    def __str__(self) -> str:
        return self.value


class TrainerStatus(_Word):
    """Whether a run has started, and how it ended."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether the run has ended."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class TrainerFn(_Word):
    """The entry point that was called."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(_Word):
    """The kind of batches that the run is processing."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether the run is validating or testing."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> Literal["train", "val", "test", "predict"] | None:
        """The prefix of this stage's loader names; None in the sanity check."""
        if self is RunningStage.SANITY_CHECKING:
            return None
        return "val" if self is RunningStage.VALIDATING else self.value  # type: ignore[return-value]
