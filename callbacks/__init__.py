"""Callbacks. Each class is imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from ..tuner.batch_size_finder import BatchSizeFinder as BatchSizeFinder
    from ..tuner.lr_finder import LearningRateFinder as LearningRateFinder
    from .base import Callback as Callback
    from .checkpoint_retention import Checkpoint as Checkpoint
    from .device_stats_monitor import DeviceStatsMonitor as DeviceStatsMonitor
    from .early_stopping import EarlyStopping as EarlyStopping
    from .finetuning import BackboneFinetuning as BackboneFinetuning
    from .finetuning import BaseFinetuning as BaseFinetuning
    from .garbage_collection import GarbageCollection as GarbageCollection
    from .gradient_accumulation_scheduler import GradientAccumulationScheduler as GradientAccumulationScheduler
    from .hang_detector import HangDetector as HangDetector
    from .lambda_callback import LambdaCallback as LambdaCallback
    from .loss_guard import LossGuard as LossGuard
    from .lr_monitor import LearningRateMonitor as LearningRateMonitor
    from .model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from .model_summary import ModelSummary as ModelSummary
    from .model_summary import RichModelSummary as RichModelSummary
    from .on_exception_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
    from .prediction_writer import BasePredictionWriter as BasePredictionWriter
    from .progress import ProgressBar as ProgressBar
    from .rich_progress import RichProgressBar as RichProgressBar
    from .rich_progress import RichProgressBarTheme as RichProgressBarTheme
    from .run_report import RunReport as RunReport
    from .stochastic_weight_averaging import StochasticWeightAveraging as StochasticWeightAveraging
    from .throughput_monitor import ThroughputMonitor as ThroughputMonitor
    from .timer import Timer as Timer
    from .tqdm_progress import TQDMProgressBar as TQDMProgressBar
    from .weight_averaging import EMAWeightAveraging as EMAWeightAveraging
    from .weight_averaging import WeightAveraging as WeightAveraging

lazy_names(
    globals(),
    {
        ".tuner.batch_size_finder": "BatchSizeFinder",
        ".tuner.lr_finder": "LearningRateFinder",
        "base": "Callback",
        "checkpoint_retention": "Checkpoint",
        "device_stats_monitor": "DeviceStatsMonitor",
        "early_stopping": "EarlyStopping",
        "finetuning": "BackboneFinetuning BaseFinetuning",
        "garbage_collection": "GarbageCollection",
        "gradient_accumulation_scheduler": "GradientAccumulationScheduler",
        "hang_detector": "HangDetector",
        "lambda_callback": "LambdaCallback",
        "loss_guard": "LossGuard",
        "lr_monitor": "LearningRateMonitor",
        "model_checkpoint": "ModelCheckpoint",
        "model_summary": "ModelSummary RichModelSummary",
        "on_exception_checkpoint": "OnExceptionCheckpoint",
        "prediction_writer": "BasePredictionWriter",
        "progress": "ProgressBar",
        "rich_progress": "RichProgressBar RichProgressBarTheme",
        "run_report": "RunReport",
        "stochastic_weight_averaging": "StochasticWeightAveraging",
        "throughput_monitor": "ThroughputMonitor",
        "timer": "Timer",
        "tqdm_progress": "TQDMProgressBar",
        "weight_averaging": "EMAWeightAveraging WeightAveraging",
    },
)
