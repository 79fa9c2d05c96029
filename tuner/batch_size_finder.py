"""Chooses the largest batch that fits into memory when a run begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..callbacks.base import Callback
from .trials_in_run import Trials

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer
    from .batch_size import BatchTrial


class BatchSizeFinder(Callback):
    """Runs ``Tuner.scale_batch_size`` when fit, validate, test or predict begins, and goes on with what it found.

    A fit that goes on from a checkpoint takes the size that was found for the run which wrote it, without a search.

    Args:
        mode: ``"power"`` doubles until a size does not fit; ``"binsearch"`` then closes in on the largest that does.
        steps_per_trial: optimizer steps (batches, when evaluating) a size has to stand.
        init_val: the first size. If it does not fit it is halved.
        max_trials: sizes to try in all.
        batch_arg_name: the attribute or hyperparameter of the module or the DataModule that hooks read.
        margin: share by which the result of ``"binsearch"`` is lowered where memory was the limit.
        max_val: the largest size to try; None: only the data limit it.
        effective_batch: samples that an update is to learn from, over all processes, or ``"keep"``: as many as with the
            size and accumulation of now. ``accumulate_grad_batches`` is then raised or lowered to it. None: left alone.

    Attributes:
        optimal_batch_size: what the last search found; None before.
        trials: the sizes tried in it, with the memory that each took.
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
        """Search here; on all ranks, before an epoch."""
        method = trainer.state.fn or "fit"
        found = Trials(trainer.current_run).find_size(self._settings, self._name, self._effective, method)
        if found is not None:
            self.optimal_batch_size, accumulate, self.trials = found
            self._accumulate = accumulate if method == "fit" else self._accumulate

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if not trainer.current_run.resumes:
            self.scale_batch_size(trainer, pl_module)
        elif self.optimal_batch_size is not None:
            Trials(trainer.current_run).put_size(self._name, self.optimal_batch_size, self._accumulate)

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
