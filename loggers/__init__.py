"""Loggers. Each class is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .aim import AimLogger as AimLogger
    from .base import DummyLogger as DummyLogger
    from .base import Logger as Logger
    from .clearml import ClearMLLogger as ClearMLLogger
    from .comet import CometLogger as CometLogger
    from .csv import CSVLogger as CSVLogger
    from .dvclive import DVCLiveLogger as DVCLiveLogger
    from .mlflow import MLFlowLogger as MLFlowLogger
    from .swanlab import SwanLabLogger as SwanLabLogger
    from .tensorboard import TensorBoardLogger as TensorBoardLogger
    from .trackio import TrackioLogger as TrackioLogger
    from .wandb import WandbLogger as WandbLogger

lazy_names(
    globals(),
    {
        "aim": "AimLogger",
        "clearml": "ClearMLLogger",
        "comet": "CometLogger",
        "dvclive": "DVCLiveLogger",
        "mlflow": "MLFlowLogger",
        "swanlab": "SwanLabLogger",
        "trackio": "TrackioLogger",
        "base": "DummyLogger Logger",
        "csv": "CSVLogger",
        "tensorboard": "TensorBoardLogger",
        "wandb": "WandbLogger",
    },
)
