"""Callback that writes predictions, either after each batch or all at the end."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from .. import messages
from .base import Callback, overridden

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer


class WriteInterval(str, Enum):
    """When a :class:`BasePredictionWriter` writes. Each member equals its string value."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """Whether to write after each batch."""
        return self is not WriteInterval.EPOCH

    @property
    def on_epoch(self) -> bool:
        """Whether to write all predictions once, at the end of the run."""
        return self is not WriteInterval.BATCH


_INTERVALS = tuple(interval.value for interval in WriteInterval)


class BasePredictionWriter(Callback):
    """Base class for callbacks that store the results of ``trainer.predict``. Every rank writes its own predictions.

    Args:
        write_interval: ``"batch"`` calls :meth:`write_on_batch_end`, ``"epoch"`` calls :meth:`write_on_epoch_end`, and
            ``"batch_and_epoch"`` calls both. To write each batch without keeping all predictions in memory, pass
            ``return_predictions=False`` to ``trainer.predict``.

    Example::

        class Writer(BasePredictionWriter):
            def write_on_batch_end(
                self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx
            ):
                torch.save(prediction, f"predictions_{dataloader_idx}_{batch_idx}.pt")

        trainer = Trainer(callbacks=[Writer()])
        trainer.predict(module, loader, return_predictions=False)
    """

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        if write_interval not in _INTERVALS:
            raise ValueError(messages.unknown("write_interval", write_interval, _INTERVALS))
        self.interval = WriteInterval(write_interval)
        self._predictions: list[list[Any]] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Store what ``predict_step`` returned for one batch. The prediction is still on the device.

        ``batch_indices`` are the dataset indices of the batch's samples, or None if the loader has no batch sampler.
        """
        raise NotImplementedError(self._unwritten("write_on_batch_end"))

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        """Store the predictions of the entire run.

        ``predictions`` has the same form as the result of ``trainer.predict``: a list with one item per batch or, with
        several loaders, a list of such lists, one per loader. The predictions are kept even with
        ``return_predictions=False``. ``batch_indices`` has one list per loader, with the dataset indices of each batch.
        """
        raise NotImplementedError(self._unwritten("write_on_epoch_end"))

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        for moment, due in (("batch", self.interval.on_batch), ("epoch", self.interval.on_epoch)):
            method = f"write_on_{moment}_end"
            if due and overridden(self, method, BasePredictionWriter) is None:
                raise NotImplementedError(self._unwritten(method))

    def _unwritten(self, method: str) -> str:
        name = type(self).__name__
        return (
            f"{name} has write_interval={self.interval.value!r}, which calls {method}, but does not define that "
            f"method. Define {name}.{method}, or choose a different write_interval ({messages.names(_INTERVALS)})."
        )

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self.interval.on_batch:
            indices = trainer.current_batch_indices
            self.write_on_batch_end(trainer, pl_module, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.interval.on_epoch:
            self._predictions[dataloader_idx].append(outputs)

    def on_predict_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._predictions = [[] for _ in trainer.num_predict_batches]

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if not self.interval.on_epoch:
            return
        kept, self._predictions = self._predictions, []
        predictions = kept if len(kept) > 1 else kept[0]
        self.write_on_epoch_end(trainer, pl_module, predictions, trainer.predict_batch_indices)
