"""The loggers of ``lightning.fabric``, whose first argument is called ``root_dir``."""

from __future__ import annotations

from typing import Any

from ...loggers import csv, tensorboard


class CSVLogger(csv.CSVLogger):
    """Values in a CSV file; see :class:`paceline.loggers.csv.CSVLogger`."""

    def __init__(
        self,
        root_dir: Any,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(root_dir, name, version, prefix, flush_logs_every_n_steps)


class TensorBoardLogger(tensorboard.TensorBoardLogger):
    """Values for TensorBoard; see :class:`paceline.loggers.tensorboard.TensorBoardLogger`."""

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
