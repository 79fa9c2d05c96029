"""Callback that finds a learning rate with a range test when a fit begins, and again at chosen epochs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from .. import messages
from ..callbacks.base import Callback
from .trials_in_run import find_lr

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer
    from .lr_range_test import LRFinder


class LearningRateFinder(Callback):
    """Runs ``Tuner.lr_find`` inside a fit, on its module and optimizer, and trains with the rate that it finds.

    Everything but the learning rate is restored after the search. A resumed fit keeps its learning rate.

    Args:
        num_training_steps: number of optimizer steps in the test.
        update_attr: train with the suggested rate, and set the module's attribute to it.
        milestones: epochs (0-based) before which to search again. Schedules then continue, scaled to the new rate.
        min_lr, max_lr, mode, early_stop_threshold, attr_name: as for ``Tuner.lr_find``.

    Attributes:
        optimal_lr: result of the last search; None before the first search.
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
        """Search now. A subclass may call this at other times, on all ranks, between two accumulation windows."""
        found = find_lr(trainer.current_run, self._settings, self._update_attr, self._attr_name)
        self.optimal_lr = found or self.optimal_lr

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if trainer.current_run.resumes:
            messages.info("LearningRateFinder is skipped, because the fit continues with the saved learning rate.")
            return
        self.lr_find(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        # on_fit_start searches for epoch 0, and an epoch resumed in the middle already has its rate.
        if trainer.current_epoch in self.milestones and trainer.current_epoch and trainer.state.next_batch == 0:
            self.lr_find(trainer, pl_module)
