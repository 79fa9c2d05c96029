"""The values that a run has logged, in the form of Lightning's ``trainer._results``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ...trainer.metric_reductions import MetricRecord, Record
from ...trainer.trainer import Trainer


class ResultMetric:
    """One logged name.

    Attributes:
        meta: its ``name`` and the arguments with which it was logged; ``meta.sync.should`` tells whether processes
            share its values.
        is_tensor: whether numbers were logged, not a torchmetrics object.
    """

    def __init__(self, record: Record) -> None:
        options, shared = record.options, record.is_shared
        self.is_tensor = not isinstance(record, MetricRecord)
        self.meta = SimpleNamespace(
            name=record.key,
            on_step=record.on_step,
            on_epoch=record.on_epoch,
            prog_bar=options.prog_bar,
            logger=record.logger,
            reduce_fx=options.reduce_fx,
            sync=SimpleNamespace(should=shared, rank_zero_only=options.rank_zero_only),
        )


class ResultCollection(dict[str, ResultMetric]):
    """What the current stage has logged, by name."""

    @property
    def result_metrics(self) -> list[ResultMetric]:
        """The values."""
        return list(self.values())


def results(trainer: Trainer) -> Any:
    """Return what the current stage has logged; None outside of a run."""
    stage = trainer.state.stage
    if stage is None:
        return None
    found = (record for of, record in trainer.current_run.metrics.known() if of == stage)
    return ResultCollection({record.key: ResultMetric(record) for record in found})
