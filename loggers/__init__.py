"""Loggers. Each class is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .base import DummyLogger as DummyLogger
    from .base import Logger as Logger
    from .csv import CSVLogger as CSVLogger
    from .tensorboard import TensorBoardLogger as TensorBoardLogger
    from .wandb import WandbLogger as WandbLogger

lazy_names(
    globals(),
    {
        "base": "DummyLogger Logger",
        "csv": "CSVLogger",
        "tensorboard": "TensorBoardLogger",
        "wandb": "WandbLogger",
    },
)
