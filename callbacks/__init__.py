"""Callbacks. Each class is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..tuner.batch_size_finder import BatchSizeFinder
    from ..tuner.lr_finder import LearningRateFinder
    from .base import Callback
    from .checkpoint_retention import Checkpoint
    from .device_stats_monitor import DeviceStatsMonitor
    from .early_stopping import EarlyStopping
    from .finetuning import BackboneFinetuning, BaseFinetuning
    from .garbage_collection import GarbageCollection
    from .gradient_accumulation_scheduler import GradientAccumulationScheduler
    from .hang_detector import HangDetector
    from .lambda_callback import LambdaCallback
    from .loss_guard import LossGuard
    from .lr_monitor import LearningRateMonitor
    from .model_checkpoint import ModelCheckpoint
    from .model_pruning import ModelPruning
    from .model_summary import ModelSummary, RichModelSummary
    from .on_exception_checkpoint import OnExceptionCheckpoint
    from .prediction_writer import BasePredictionWriter
    from .progress import ProgressBar
    from .rich_progress import RichProgressBar, RichProgressBarTheme
    from .run_report import RunReport
    from .stochastic_weight_averaging import StochasticWeightAveraging
    from .throughput_monitor import ThroughputMonitor
    from .timer import Timer
    from .tqdm_progress import TQDMProgressBar
    from .weight_averaging import EMAWeightAveraging, WeightAveraging

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "BatchSizeFinder",
    "Callback",
    "Checkpoint",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "GarbageCollection",
    "GradientAccumulationScheduler",
    "HangDetector",
    "LambdaCallback",
    "LearningRateFinder",
    "LearningRateMonitor",
    "LossGuard",
    "ModelCheckpoint",
    "ModelPruning",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "ProgressBar",
    "RichModelSummary",
    "RichProgressBar",
    "RichProgressBarTheme",
    "RunReport",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "ThroughputMonitor",
    "Timer",
    "WeightAveraging",
]

_FILES = {
    "base": ("Callback",),
    ".tuner.batch_size_finder": ("BatchSizeFinder",),
    "checkpoint_retention": ("Checkpoint",),
    "device_stats_monitor": ("DeviceStatsMonitor",),
    "early_stopping": ("EarlyStopping",),
    "finetuning": ("BackboneFinetuning", "BaseFinetuning"),
    "garbage_collection": ("GarbageCollection",),
    "gradient_accumulation_scheduler": ("GradientAccumulationScheduler",),
    "hang_detector": ("HangDetector",),
    "lambda_callback": ("LambdaCallback",),
    "loss_guard": ("LossGuard",),
    ".tuner.lr_finder": ("LearningRateFinder",),
    "lr_monitor": ("LearningRateMonitor",),
    "model_checkpoint": ("ModelCheckpoint",),
    "model_pruning": ("ModelPruning",),
    "model_summary": ("ModelSummary", "RichModelSummary"),
    "on_exception_checkpoint": ("OnExceptionCheckpoint",),
    "prediction_writer": ("BasePredictionWriter",),
    "progress": ("ProgressBar",),
    "rich_progress": ("RichProgressBar", "RichProgressBarTheme"),
    "run_report": ("RunReport",),
    "stochastic_weight_averaging": ("StochasticWeightAveraging",),
    "throughput_monitor": ("ThroughputMonitor",),
    "timer": ("Timer",),
    "tqdm_progress": ("TQDMProgressBar",),
    "weight_averaging": ("EMAWeightAveraging", "WeightAveraging"),
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_FILE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
