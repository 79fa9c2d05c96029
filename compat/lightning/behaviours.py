"""Where programs written for Lightning expect another behaviour: applied to Paceline's classes by the stand-in."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .exceptions import translated

#: Modules of Paceline, their classes, and which of their methods raise errors that programs catch as Lightning's.
_RAISING = {
    "trainer.trainer": {"Trainer": "__init__ fit validate test predict save_checkpoint"},
    "trainer.module": {"TrainingModule": "log log_dict manual_backward optimizers lr_schedulers save_hyperparameters"},
    "callbacks.early_stopping": {"EarlyStopping": "__init__"},
    "callbacks.finetuning": {"BackboneFinetuning": "__init__"},
    "callbacks.gradient_accumulation_scheduler": {"GradientAccumulationScheduler": "__init__"},
    "callbacks.lr_monitor": {"LearningRateMonitor": "__init__"},
    "callbacks.model_checkpoint": {"ModelCheckpoint": "__init__"},
    "callbacks.stochastic_weight_averaging": {"StochasticWeightAveraging": "__init__"},
    "callbacks.timer": {"Timer": "__init__"},
    "cli.argument_parser": {"ArgumentParser": "__init__ add_lightning_class_args"},
    "cli.trainer_cli": {"TrainerCLI": "__init__", "SaveConfigCallback": "__init__ setup"},
    "profilers.pytorch": {"PyTorchProfiler": "__init__"},
    "strategies.precision.mixed": {"MixedPrecision": "__init__"},
    "tuner.tuner": {"Tuner": "scale_batch_size lr_find"},
}


def install() -> None:
    """Change them."""
    from ...checkpoint import instantiate
    from ...loggers.csv import CSVLogger
    from ...loggers.tensorboard import TensorBoardLogger
    from ...trainer.trainer import Trainer

    for logger in (CSVLogger, TensorBoardLogger):
        defaults = logger.__init__.__defaults__ or ()
        logger.__init__.__defaults__ = tuple("lightning_logs" if one == "paceline_logs" else one for one in defaults)
    instantiate.MARK = "lightning.pytorch.cli.instantiate_module"
    values = Trainer.logged_metrics.fget
    Trainer.logged_metrics = property(lambda trainer: _tensors(values(trainer)), doc=Trainer.logged_metrics.__doc__)
    for module, classes in _RAISING.items():
        for name, methods in classes.items():
            owner: Any = getattr(import_module(f"paceline.{module}"), name)
            for method in methods.split():
                setattr(owner, method, translated(getattr(owner, method)))


def _tensors(values: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in values.items()}
