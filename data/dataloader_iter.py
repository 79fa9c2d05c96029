"""The iterator that ``training_step(dataloader_iter)`` gets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .batches import Batches

if TYPE_CHECKING:
    from ..trainer.metrics import MetricStore


class HandOver:
    """Lets the step fetch batches itself. The loop iterates over this object and gets it back, once per step.

    Args:
        batches: prepared with look-ahead, so that the last batch is known.
        start: index of the first batch.
        metrics: told of each batch, whose size weighs what is logged.
    """

    def __init__(self, batches: Batches, start: int, metrics: MetricStore) -> None:
        self._batches = batches
        self._start = start
        self._metrics = metrics
        self._iterator: Iterator[Any] = iter(())
        self.taken = 0

    @property
    def exhausted(self) -> bool:
        """No batch is left."""
        return self._batches.exhausted

    def close(self) -> None:
        """Let go of a half-read pass."""
        self._batches.close()

    def __iter__(self) -> Iterator[HandOver]:
        self._iterator = iter(self._batches)  # now, not with the first batch
        self.taken = 0
        return self._turns()

    def _turns(self) -> Iterator[HandOver]:
        while not self.exhausted:
            yield self

    def __next__(self) -> tuple[Any, int, int]:
        batch = self._metrics.batch = next(self._iterator)
        self.taken += 1
        return batch, self._start + self.taken - 1, 0
