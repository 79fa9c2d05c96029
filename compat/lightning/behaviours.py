"""Behavior that programs written for Lightning expect; the stand-in applies it to Paceline's classes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .exceptions import translated

#: Modules of Paceline, their classes, and the methods whose errors programs catch as Lightning's.
_RAISING = {
    "trainer.trainer": {"Trainer": "__init__ fit validate test predict save_checkpoint"},
    "trainer.module": {"TrainingModule": "log log_dict manual_backward optimizers lr_schedulers save_hyperparameters"},
    "callbacks.early_stopping": {"EarlyStopping": "__init__"},
    "callbacks.finetuning": {"BackboneFinetuning": "__init__"},
    "callbacks.gradient_accumulation_scheduler": {"GradientAccumulationScheduler": "__init__"},
    "callbacks.lr_monitor": {"LearningRateMonitor": "__init__"},
    "callbacks.model_checkpoint": {"ModelCheckpoint": "__init__"},
    "callbacks.model_pruning": {"ModelPruning": "__init__ setup"},
    "callbacks.stochastic_weight_averaging": {"StochasticWeightAveraging": "__init__"},
    "callbacks.timer": {"Timer": "__init__"},
    "cli.argument_parser": {"ArgumentParser": "__init__ add_lightning_class_args"},
    "cli.trainer_cli": {"TrainerCLI": "__init__", "SaveConfigCallback": "__init__ setup"},
    "profilers.pytorch": {"PyTorchProfiler": "__init__"},
    "strategies.precision.mixed": {"MixedPrecision": "__init__"},
    "tuner.tuner": {"Tuner": "scale_batch_size lr_find"},
}
#: Prefixes of the names of profiled actions, in Paceline and in Lightning.
_ACTIONS = {
    "[TrainingModule]": "[LightningModule]",
    "[DataModule]": "[LightningDataModule]",
    "[Strategy]SingleDevice.": "[Strategy]SingleDeviceStrategy.",
}


#: Strategies that take additional arguments under the stand-in, as Lightning's do.
_STRATEGIES = {
    "strategies.base": "SingleDevice",
    "strategies.ddp": "DDPStrategy",
    "strategies.deepspeed.strategy": "DeepSpeedStrategy",
    "strategies.fsdp.strategy": "FSDPStrategy",
    "strategies.model_parallel.strategy": "ModelParallelStrategy",
}


def install() -> None:
    """Apply Lightning's behavior to Paceline's classes."""
    from ...checkpoint import instantiate
    from ...loggers.csv import CSVLogger
    from ...loggers.tensorboard import TensorBoardLogger
    from ...processes.accelerators import Accelerator
    from ...profilers.base import Profiler
    from ...trainer.trainer import Trainer

    instantiate.MARK = "lightning.pytorch.cli.instantiate_module"
    setattr(Accelerator, "get_device_stats", _device_stats)  # noqa: B010 - a name that Paceline has elsewhere
    for module, name in _STRATEGIES.items():
        _take_lightnings_arguments(getattr(import_module(f"paceline.{module}"), name))
    for logger in (CSVLogger, TensorBoardLogger):
        defaults = logger.__init__.__defaults__ or ()
        logger.__init__.__defaults__ = tuple("lightning_logs" if one == "paceline_logs" else one for one in defaults)
    values: Any = Trainer.logged_metrics
    setattr(Trainer, "logged_metrics", property(lambda trainer: _tensors(values.fget(trainer)), doc=values.__doc__))  # noqa: B010
    around: Any = Profiler.around
    setattr(Profiler, "around", lambda profiler, name, function: around(profiler, _action(name), function))  # noqa: B010
    for module, classes in _RAISING.items():
        for name, methods in classes.items():
            owner: Any = getattr(import_module(f"paceline.{module}"), name)
            for method in methods.split():
                setattr(owner, method, translated(getattr(owner, method)))


def _device_stats(accelerator: Any, device: torch.device | str) -> dict[str, float]:
    """A device's statistics, as ``DeviceStatsMonitor`` logs them."""
    from ...callbacks.device_stats_monitor import cpu_stats, device_stats

    device = torch.device(device)
    return cpu_stats() if device.type == "cpu" else device_stats(device)


def _action(name: str) -> str:
    for own, theirs in _ACTIONS.items():
        if name.startswith(own):
            return theirs + name.removeprefix(own)
    return name


def _tensors(values: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in values.items()}


def _take_lightnings_arguments(strategy: Any) -> None:
    """Let a strategy's constructor take ``precision_plugin``, ``checkpoint_io`` and ``cluster_environment``.

    ``accelerator`` and ``parallel_devices`` are ignored, because the Trainer has them as arguments.
    """
    init = strategy.__init__

    @functools.wraps(init)
    def take(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("accelerator", "parallel_devices"):
            kwargs.pop(name, None)
        parts = {name: kwargs.pop(name, None) for name in ("checkpoint_io", "cluster_environment")}
        precision = kwargs.pop("precision_plugin", None)
        if precision is not None:
            kwargs["precision"] = precision
        init(self, *args, **kwargs)
        for name, part in parts.items():
            if part is not None:
                setattr(self, name, part)

    strategy.__init__ = take
