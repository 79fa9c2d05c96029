"""Lightning's ThroughputMonitor, which computes and logs values at other times than Paceline's monitor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from ... import messages
from ...callbacks import throughput_monitor
from ...callbacks.throughput_monitor import Throughput

if TYPE_CHECKING:
    from ...trainer.module import TrainingModule
    from ...trainer.trainer import Trainer


class ThroughputMonitor(throughput_monitor.ThroughputMonitor):
    """Like Paceline's ThroughputMonitor, but logs rates once the window is full, and evaluation values in each batch.

    The time between the last batch before a validation and the last batch of the validation does not count as training
    time. Without a logger, the callback only warns.
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int],
        length_fn: Callable[[Any], int] | None = None,
        *,
        window_size: int = 100,
        separator: str = "/",
    ) -> None:
        super().__init__(batch_size_fn, length_fn, window_size, separator)
        self._throughputs: dict[str, Throughput] = {}
        self._evaluated = 0

    def _require_logger(self, trainer: Trainer, values: str = "its values") -> None:
        if not trainer.loggers:
            messages.warn(
                "ThroughputMonitor cannot log its values, because there is no logger. Set, for example, "
                "Trainer(logger=True)."
            )

    def _count(self, trainer: Trainer, with_flops: bool = False) -> Any:
        stage = str(trainer.state.stage)
        window = Throughput(self._peak, trainer.world_size, self.window_size, self.separator)
        self._throughputs[stage] = window
        return _Clock(window)

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._evaluated = 0
        if not hasattr(pl_module, "flops_per_batch"):
            messages.warn_once(
                "When using the `ThroughputMonitor`, you need to define a `flops_per_batch` attribute or property in "
                f"{type(pl_module).__name__} to compute the FLOPs."
            )
        super().on_train_start(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if not trainer.sanity_checking:
            self._eval = self._count(trainer)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.sanity_checking:
            return
        super().on_validation_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)
        self._evaluated += 1
        if trainer.logs_this_step or trainer.state.fn != "fit":
            stage = "test" if trainer.testing else "validate"
            values = self._eval.throughput.compute()
            logged = {f"{stage}{self.separator}{key}": value for key, value in values.items()}
            trainer.current_run.send_metrics(logged, self._evaluated)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            cast(_Clock, self._train).leave_out(cast(_Clock, self._eval))

    on_test_start = on_validation_start
    on_test_batch_end = on_validation_batch_end
    on_test_end = on_validation_end

    def _log(self, trainer: Trainer, stage: str, count: Any) -> None:
        values = count.throughput.compute()
        trainer.log_metrics({f"{stage}{self.separator}{key}": value for key, value in values.items()})


class _Clock:
    """Counts batches and measures time for a :class:`Throughput`, starting when this object is created."""

    def __init__(self, throughput: Throughput) -> None:
        self.throughput = throughput
        self.batches = self._samples = self._lengths = 0
        self._started = self._last = time.perf_counter()

    def add(self, samples: int, lengths: int | None = None, flops: float | None = None) -> None:
        """Count a finished batch."""
        self._last = time.perf_counter()
        self.batches += 1
        self._samples += samples
        self._lengths += lengths or 0
        self.throughput.update(
            time=self._last - self._started,
            batches=self.batches,
            samples=self._samples,
            lengths=None if lengths is None else self._lengths,
            flops=flops,
        )

    def leave_out(self, other: _Clock) -> None:
        """Exclude the time between this clock's last batch and another clock's last batch."""
        self._started += other._last - self._last
