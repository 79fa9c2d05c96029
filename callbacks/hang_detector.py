"""Callback that stops a run that makes no progress and reports where every rank was."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from .. import messages
from .base import Callback

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer

#: Exit status of a run that hung; the ``timeout`` command uses the same one.
HANG_STATUS = 124
_LOOKS = 8
_LONGEST_PAUSE_SECONDS = 10.0


class HangDetector(Callback):
    """Stop a run whose counters stop changing, and print every rank's step, phase and stacks to standard error.

    A thread on each rank compares the counters, so there is no cost per batch. A new batch, optimizer step, epoch or
    stage counts as progress. Other operations do not: preparing data, the first batch of a compiled model, a
    checkpoint, a slow hook. Choose a timeout well above the longest of these operations. A rank inside native code that
    holds the GIL cannot respond. The report lists such a rank as not responding, and the launcher stops it.

    Args:
        timeout_seconds: how long the counters may stay unchanged.
        abort: exit with status 124 right after the report, without a checkpoint or teardown. The launcher then stops
            the other processes, as after any failure. If False, only report, once per hang.

    Example:
        >>> HangDetector(timeout_seconds=1800).abort
        True
    """

    def __init__(self, timeout_seconds: float = 1800.0, abort: bool = True) -> None:
        if isinstance(timeout_seconds, bool) or not isinstance(timeout_seconds, (int, float)) or timeout_seconds <= 0:
            raise ValueError(
                f"HangDetector: timeout_seconds={timeout_seconds!r} must be a positive number. Pass more seconds "
                "than the longest step, checkpoint or data preparation takes."
            )
        self.timeout_seconds = timeout_seconds
        self.abort = abort
        self._ended: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        self._ended = threading.Event()
        name = f"paceline-hang-{stage}"
        self._thread = threading.Thread(target=self._look, args=(trainer, self._ended), name=name, daemon=True)
        self._thread.start()

    def teardown(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        if self._ended is not None and self._thread is not None:
            self._ended.set()
            self._thread.join()
        self._ended = self._thread = None

    def _look(self, trainer: Trainer, ended: threading.Event) -> None:
        pause = min(self.timeout_seconds / _LOOKS, _LONGEST_PAUSE_SECONDS)
        mark, since, told = _mark(trainer), time.monotonic(), False
        while not ended.wait(pause):
            now = _mark(trainer)
            if now != mark:
                mark, since, told = now, time.monotonic(), False
            elif not told and time.monotonic() - since >= self.timeout_seconds:
                told = True
                self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        reports = trainer.strategy.reports()
        if reports is not None:
            what = f"The run exits with status {HANG_STATUS}." if self.abort else "The run keeps waiting."
            messages.error(
                f"Rank {trainer.global_rank} has made no progress for {self.timeout_seconds:g} s (HangDetector). "
                f"{what} Position of each rank:\n" + "\n".join(map(_told, reports, reports.values()))
            )
        if self.abort:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(HANG_STATUS)


def _mark(trainer: Trainer) -> tuple[Any, ...]:
    state = trainer.state
    return state.fn, state.stage, state.epoch, state.batch_idx, state.global_step, state.evaluated, state.boundaries


def _told(rank: int, report: str) -> str:
    return f"Rank {rank}: {report or 'does not respond (it has exited, or native code holds its GIL)'}"
