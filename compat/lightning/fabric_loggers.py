"""Fabric's loggers, whose first argument is ``root_dir``, and Fabric's ``ThroughputMonitor``.

Command lines select a logger by its class name, so these classes and Paceline's loggers have different names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...callbacks.throughput_monitor import Throughput, compute_dtype, peak_flops
from ...loggers import csv, tensorboard
from .csv_files import log_metrics

if TYPE_CHECKING:
    from .fabric import Fabric


class FabricCSVLogger(csv.CSVLogger):
    """Logs values to a CSV file; see :class:`paceline.loggers.csv.CSVLogger`."""

    def __init__(
        self,
        root_dir: Any,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(root_dir, name, version, prefix, flush_logs_every_n_steps)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers and strings for one step."""
        log_metrics(self, metrics, step)


class FabricTensorBoardLogger(tensorboard.TensorBoardLogger):
    """Logs values for TensorBoard; see :class:`paceline.loggers.tensorboard.TensorBoardLogger`."""

    def __init__(
        self,
        root_dir: Any,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            root_dir, name, version, default_hp_metric=default_hp_metric, prefix=prefix, sub_dir=sub_dir, **kwargs
        )


class ThroughputMonitor(Throughput):
    """A :class:`Throughput` that uses the device count, peak FLOP/s and loggers of a :class:`Fabric`."""

    def __init__(self, fabric: Fabric, **kwargs: Any) -> None:
        peak = peak_flops(fabric.device, compute_dtype(fabric.strategy.precision.name))
        super().__init__(available_flops=peak, world_size=fabric.world_size, **kwargs)
        self._fabric = fabric
        self.step = -1

    def compute_and_log(self, step: int | None = None, **kwargs: Any) -> dict[str, float]:
        """Compute the rates and log them.

        Args:
            step: the step to log the values for; by default, the previous step plus 1.
            **kwargs: arguments for :meth:`Throughput.compute`.
        """
        self.step = self.step + 1 if step is None else step
        metrics = self.compute(**kwargs)
        self._fabric.log_dict(metrics, step=self.step)
        return metrics
