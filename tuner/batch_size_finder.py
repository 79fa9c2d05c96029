"""Callback that finds the largest batch size that fits into memory when a run begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..callbacks.base import Callback
from .trials_in_run import find_size, resume_size

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer
    from .batch_size import BatchTrial


class BatchSizeFinder(Callback):
    """Runs ``Tuner.scale_batch_size`` when fit, validate, test or predict begins, and uses the size that it finds.

    A resumed fit does not search; it uses the batch size from the checkpoint.

    Args:
        mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val, effective_batch: as for
            ``Tuner.scale_batch_size``.

    Attributes:
        optimal_batch_size: result of the last search; None before the first search.
        trials: the sizes that the last search tried, with the memory used by each.
    """

    runs_first = True

    def __init__(
        self,
        mode: Literal["power", "binsearch"] = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int | None = 8192,
        effective_batch: int | Literal["keep"] | None = None,
    ) -> None:
        self._settings: dict[str, Any] = {
            "mode": mode,
            "steps_per_trial": steps_per_trial,
            "init_val": init_val,
            "max_trials": max_trials,
            "margin": margin,
            "max_val": max_val,
        }
        self._name, self._effective = batch_arg_name, effective_batch
        self.optimal_batch_size: int | None = None
        self.trials: list[BatchTrial] = []
        self._accumulate = 1

    def scale_batch_size(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Search now. Call this on all ranks, before an epoch."""
        method = trainer.state.fn or "fit"
        found = find_size(trainer.current_run, self._settings, self._name, self._effective, method)
        if found is not None:
            self.optimal_batch_size, accumulate, self.trials = found
            self._accumulate = accumulate if method == "fit" else self._accumulate

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if not trainer.current_run.resumes:
            self.scale_batch_size(trainer, pl_module)
        elif self.optimal_batch_size is not None:
            resume_size(trainer.current_run, self._name, self.optimal_batch_size, self._accumulate)

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if trainer.state.fn == "validate":
            self.scale_batch_size(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self.scale_batch_size(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self.scale_batch_size(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        if self.optimal_batch_size is None:
            return {}
        return {"optimal_batch_size": self.optimal_batch_size, "accumulate_grad_batches": self._accumulate}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimal_batch_size = state_dict["optimal_batch_size"]
        self._accumulate = state_dict["accumulate_grad_batches"]
