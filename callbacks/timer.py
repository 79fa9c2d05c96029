"""Callback that stops training after a given time and measures how long each stage takes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import timedelta
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, get_args

from .. import messages
from .base import Callback

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer

Stage = Literal["train", "sanity_check", "validate", "test", "predict"]
STAGES: tuple[Stage, ...] = get_args(Stage)
_UNITS = ("weeks", "days", "hours", "minutes", "seconds", "milliseconds", "microseconds")


class Timer(Callback):
    """Stop training when ``duration`` is used up, and measure how long every stage takes.

    Training time is wall time from ``on_train_start`` on, including validation. It is saved in checkpoints, so a
    resumed run has only the remaining time. A fit that rolls back to one of its checkpoints (``LossGuard``) does not
    get the lost time back. With several processes, all of them stop at the same batch, soon after the limit is reached
    on any process's clock.

    Args:
        duration: ``"DD:HH:MM:SS"``, a ``timedelta`` or its arguments as a dict (``{"hours": 2}``). If None, the timer
            only measures.
        interval: check the clock after each ``"step"`` (training batch) or at the end of each ``"epoch"``.
        verbose: report when the time is up.
        grace_seconds: stop this long before the end of ``duration``, to leave time for the current step, a validation
            and the last checkpoint.

    Example:
        >>> Timer("00:12:00:00").time_remaining()
        43200.0
    """

    def __init__(
        self,
        duration: str | timedelta | Mapping[str, float] | None = None,
        interval: Literal["step", "epoch"] = "step",
        verbose: bool = True,
        grace_seconds: float = 0.0,
    ) -> None:
        super().__init__()
        if interval not in ("step", "epoch"):
            raise ValueError(
                f"{messages.unknown('Timer interval', interval, ('step', 'epoch'))} The interval says when to check "
                "the clock: after each training batch or at the end of each epoch."
            )
        if not isinstance(grace_seconds, (int, float)) or not 0 <= grace_seconds < math.inf:
            raise ValueError(
                f"Timer: grace_seconds={grace_seconds!r} must be a finite number of at least 0. Pass the number of "
                "seconds that the last step and its checkpoint take."
            )
        self._grace = grace_seconds
        self._duration = None if duration is None else to_timedelta(duration, "Timer(duration=)").total_seconds()
        self.limits_training = duration is not None
        self._verbose = verbose
        self._start: dict[str, float] = {}
        self._end: dict[str, float] = {}
        self._used_before = 0.0
        self._deadline = math.inf
        self._announced = False
        self._by_step = self._duration is not None and interval == "step"
        if not self._by_step:
            self._undefine(Timer, "on_train_batch_end")

    def start_time(self, stage: Stage = "train") -> float | None:
        """Return the ``time.perf_counter()`` value at the stage's last start; None if it never started."""
        return self._start.get(_known(stage))

    def end_time(self, stage: Stage = "train") -> float | None:
        """Return the ``time.perf_counter()`` value at the stage's last end; None while it runs or if it never ran."""
        return self._end.get(_known(stage))

    def time_elapsed(self, stage: Stage = "train") -> float:
        """Return how many seconds a stage has taken; ``"train"`` includes the time before a resume."""
        start = self.start_time(stage)
        used_before = self._used_before if stage == "train" else 0.0
        if start is None:
            return used_before
        return self._end.get(stage, perf_counter()) - start + used_before

    def time_remaining(self, stage: Stage = "train") -> float | None:
        """Return the seconds until ``duration`` is used up (negative after that); None if no duration is set."""
        return None if self._duration is None else self._duration - self.time_elapsed(stage)

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if not self._training:
            self._begin("train")
        self._announced = False
        if self._duration is not None:
            self._deadline = self._start["train"] + self._duration - self._used_before - self._grace
            if perf_counter() >= self._deadline:
                self._stop(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Mapping[str, Any] | None, batch: Any, batch_idx: int
    ) -> None:
        if self._by_step and perf_counter() >= self._deadline:
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if not self._by_step and perf_counter() >= self._deadline:
            self._stop(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._finish("train")

    def on_exception(self, trainer: Trainer, pl_module: TrainingModule, exception: BaseException) -> None:
        if self._training:
            self._finish("train")

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._begin("sanity_check" if trainer.sanity_checking else "validate")

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._finish("sanity_check" if trainer.sanity_checking else "validate")

    def on_test_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._begin("test")

    def on_test_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._finish("test")

    def on_predict_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._begin("predict")

    def on_predict_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._finish("predict")

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in STAGES}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._training:
            self._start.pop("train", None)
            self._end.pop("train", None)
            self._used_before = float(state_dict["time_elapsed"]["train"])

    @property
    def _training(self) -> bool:
        """Whether training has begun and not ended. Also True while a fit rolls back to one of its checkpoints."""
        return "train" in self._start and "train" not in self._end

    def _begin(self, stage: str) -> None:
        self._end.pop(stage, None)
        self._start[stage] = perf_counter()

    def _finish(self, stage: str) -> None:
        self._end[stage] = perf_counter()

    def _stop(self, trainer: Trainer) -> None:
        trainer.should_stop = True
        if self._verbose and not self._announced:
            elapsed = timedelta(seconds=int(self.time_elapsed()))
            messages.info(f"Time limit reached. Elapsed time: {elapsed}. Signaling Trainer to stop.")
        self._announced = True


def to_timedelta(value: str | timedelta | Mapping[str, float], what: str) -> timedelta:
    """Convert a duration to a ``timedelta``.

    Args:
        value: ``"DD:HH:MM:SS"``, a ``timedelta``, or its arguments as a dict.
        what: name of the argument, for error messages.

    Raises:
        ValueError: if the string is malformed, a key is unknown, or the duration is negative.
        TypeError: for other types.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", value.strip())
        if match is None:
            raise ValueError(
                f"{what} got {value!r}, which does not have the form 'DD:HH:MM:SS'. "
                "Use '00:12:30:00' for twelve and a half hours, for example, or pass a timedelta."
            )
        days, hours, minutes, seconds = map(int, match.groups())
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if isinstance(value, Mapping):
        for unit in value:
            if unit not in _UNITS:
                raise ValueError(f"{what} got {dict(value)!r}. {messages.unknown('unit', unit, _UNITS)}")
        value = timedelta(**value)
    if not isinstance(value, timedelta):
        raise TypeError(
            f"{what} got {value!r} of type {type(value).__name__}, whose unit is unknown. "
            "Pass timedelta(seconds=...), a string 'DD:HH:MM:SS' or a dict such as {'minutes': 30}."
        )
    if value < timedelta(0):
        raise ValueError(f"{what} got {value!r}, which is negative. Pass a duration of zero or more.")
    return value


def _known(stage: str) -> str:
    if stage not in STAGES:
        raise ValueError(f"{messages.unknown('stage', stage, STAGES)} Timer measures each of these separately.")
    return stage
