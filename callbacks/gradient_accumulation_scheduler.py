"""Callback that changes gradient accumulation during training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .. import messages
from .base import Callback, overridden

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer


class GradientAccumulationScheduler(Callback):
    """Set ``trainer.accumulate_grad_batches`` at the start of each epoch.

    Args:
        scheduling: maps an epoch (0-based) to the number of batches per optimizer step from that epoch on. Before the
            first epoch in the dict, the number is 1.

    Raises:
        ValueError: when the run starts, if ``Trainer(accumulate_grad_batches=)`` is set too.
        RuntimeError: when the run starts, if the module uses manual optimization.

    Example:
        >>> GradientAccumulationScheduler({4: 2, 8: 4}).get_accumulate_grad_batches(epoch=5)
        2
    """

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        super().__init__()
        if not isinstance(scheduling, Mapping) or not scheduling:
            raise TypeError(
                f"GradientAccumulationScheduler: scheduling={scheduling!r} contains no epochs. "
                "Pass a dict that maps epochs to batches per step, such as {0: 1, 4: 2}."
            )
        for epoch, batches in scheduling.items():
            if not _whole(epoch, at_least=0):
                raise ValueError(
                    f"GradientAccumulationScheduler: scheduling={dict(scheduling)!r} has the key {epoch!r}, which is "
                    "not an epoch. Epochs are whole numbers, starting at 0."
                )
            if not _whole(batches, at_least=1):
                raise ValueError(
                    f"GradientAccumulationScheduler(scheduling={dict(scheduling)!r}) sets {batches!r} batches per "
                    f"step from epoch {epoch} on. Use a whole number of at least 1."
                )
        self.scheduling = {0: 1, **scheduling}
        self.epochs = sorted(self.scheduling)
        self._in_charge = False

    def going_to_accumulate_grad_batches(self) -> bool:
        """Return True if any epoch accumulates more than one batch per step."""
        return any(batches > 1 for batches in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the number of batches per optimizer step in ``epoch`` (0-based)."""
        return self.scheduling[max(start for start in self.epochs if start <= epoch)]

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        if stage != "fit":
            return
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) and "
                f"GradientAccumulationScheduler({self.scheduling}) both set the number of batches per step. Remove "
                "one of them."
            )
        self._in_charge = True
        self._set(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if not pl_module.automatic_optimization:
            raise RuntimeError(
                f"{type(pl_module).__name__}.automatic_optimization is False, so its training_step decides when to "
                f"step, and GradientAccumulationScheduler({self.scheduling}) would have no effect. Remove the "
                "callback, or use automatic optimization."
            )
        own = [hook for hook in ("optimizer_step", "optimizer_zero_grad") if overridden(pl_module, hook) is not None]
        if own and self.going_to_accumulate_grad_batches():
            messages.warn_once(
                f"{type(pl_module).__name__} overrides {messages.names(own, 'and')}, which the trainer calls once per "
                f"optimizer step, not once per batch. GradientAccumulationScheduler({self.scheduling}) uses several "
                "batches per step, so make sure that the overrides do not count batches."
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._set(trainer)

    def teardown(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        if self._in_charge:
            trainer.accumulate_grad_batches = 1
        self._in_charge = False

    def _set(self, trainer: Trainer) -> None:
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)


def _whole(value: object, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least
