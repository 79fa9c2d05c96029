"""Chooses the learning rate by a range test when a fit begins, and again at epochs of choice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from .. import messages
from ..callbacks.base import Callback
from .trials_in_run import Trials

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer
    from .learning_rate import LRFinder


class LearningRateFinder(Callback):
    """Runs ``Tuner.lr_find`` within a fit, on module and optimizer as they are there, and goes on with the rate.

    All but the rate is put back. A fit that goes on from a checkpoint keeps the rate that it had.

    Args:
        min_lr: the first rate.
        max_lr: the last.
        num_training_steps: optimizer steps.
        mode: how the rate grows: ``"exponential"`` or ``"linear"``.
        early_stop_threshold: end when the smoothed loss is so many times the lowest so far; None: never.
        update_attr: train with the suggestion, and set it where the module keeps its rate.
        attr_name: where that is; empty: ``lr`` or ``learning_rate``, an attribute or a hyperparameter.
        milestones: epochs (0-based) before which to search again. Schedules then go on in proportion.

    Attributes:
        optimal_lr: what the last search found; None before.
    """

    runs_first = True

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training_steps: int = 100,
        mode: Literal["exponential", "linear"] = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
        milestones: Iterable[int] = (),
    ) -> None:
        self._settings: dict[str, Any] = {
            "min_lr": min_lr,
            "max_lr": max_lr,
            "num_training": num_training_steps,
            "mode": mode,
            "early_stop_threshold": early_stop_threshold,
        }
        self._update_attr, self._attr_name = update_attr, attr_name
        self.milestones = frozenset(milestones)
        self.optimal_lr: LRFinder | None = None

    def lr_find(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Search here; for a subclass that does so at other moments, on all ranks, between two accumulation windows."""
        found = Trials(trainer.current_run).find_lr(self._settings, self._update_attr, self._attr_name)
        self.optimal_lr = found or self.optimal_lr

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if trainer.current_run.resumes:
            messages.info("LearningRateFinder does nothing: the fit continues with the checkpoint's learning rate.")
            return
        self.lr_find(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        # Epoch 0 is searched for when the fit begins, and an epoch that a resume entered in the middle has its rate.
        if trainer.current_epoch in self.milestones and trainer.current_epoch and trainer.state.next_batch == 0:
            self.lr_find(trainer, pl_module)
