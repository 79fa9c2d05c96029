"""Behavior that programs written for Lightning expect, added to Paceline's classes when they replace Lightning's."""

from __future__ import annotations

import functools
import inspect
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, get_type_hints

import torch
from torch import Tensor

from ... import messages
from ...processes.signals import interruption
from .exceptions import SIGTERMException, exiting, translated
from .testing import complete_mocks, is_logger
from .texts import advising_evaluation, advising_train, datamodule_text, speak_again

#: Paceline's modules, their classes, and the methods whose errors programs catch as Lightning's.
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
#: Prefixes of profiled actions' names, in Paceline and in Lightning.
_ACTIONS = {
    "[TrainingModule]": "[LightningModule]",
    "[DataModule]": "[LightningDataModule]",
    "[Strategy]SingleDevice.": "[Strategy]SingleDeviceStrategy.",
}


#: Strategies that accept additional arguments when they replace Lightning's.
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
    from ...trainer import default_callbacks, start_run, stopping
    from . import plugins, views

    users: list[Any] = [default_callbacks, start_run]
    for user in users:
        user.order = functools.partial(_ordered, user.order)
    default_callbacks.ENTRY_POINTS.append("lightning.pytorch.callbacks_factory")
    instantiate.MARK = "lightning.pytorch.cli.instantiate_module"
    stopping.interruption = _interruption
    plugins.install()
    views.install()
    for module, name in _STRATEGIES.items():
        plugins.take_arguments(getattr(import_module(f"paceline.{module}"), name))
    _change_loggers()
    _change_callbacks()
    _replace_methods()
    _translate_errors()


def _change_loggers() -> None:
    from ...loggers.csv import CSVLogger, ExperimentWriter
    from ...loggers.mlflow import MLFlowLogger
    from ...loggers.tensorboard import TensorBoardLogger

    for logger in (CSVLogger, MLFlowLogger, TensorBoardLogger):
        defaults = logger.__init__.__defaults__ or ()
        logger.__init__.__defaults__ = tuple("lightning_logs" if one == "paceline_logs" else one for one in defaults)
    ExperimentWriter.first_columns = ("step",)
    save = TensorBoardLogger.save

    def save_run(logger: TensorBoardLogger) -> None:
        _ = logger.experiment  # creates the run's folder
        save(logger)

    _replace({(TensorBoardLogger, "save"): save_run})


def _change_callbacks() -> None:
    from ...callbacks.checkpoint_retention import CheckpointKeeper
    from ...callbacks.device_stats_monitor import DeviceStatsMonitor
    from ...callbacks.early_stopping import EarlyStopping
    from ...callbacks.model_checkpoint import ModelCheckpoint
    from ...callbacks.stochastic_weight_averaging import StochasticWeightAveraging
    from .callbacks import raising_runtime_error, refusing_uncalled, warning_without_validation

    range_test: Any = import_module("paceline.tuner.lr_range_test").RangeTest
    begin: Any = StochasticWeightAveraging._begin
    take_in: Any = CheckpointKeeper._take_in
    rate = range_test.rate

    def rank(keeper: Any, path: str, score: Tensor | None, gone: Any) -> None:
        if score is not None and score.isnan():
            score = keeper.current_score = torch.tensor(float("inf" if keeper.mode == "min" else "-inf"))
        take_in(keeper, path, score, gone)

    def begin_averaging(callback: Any, trainer: Any, module: Any) -> None:
        begin(callback, trainer, module)
        for group in trainer.optimizers[0].param_groups:
            group["initial_lr"] = group["swa_lr"]

    _replace(
        {
            (CheckpointKeeper, "_take_in"): rank,
            (DeviceStatsMonitor, "_check_keys"): _warn_of_keys,
            (EarlyStopping, "_value"): raising_runtime_error(EarlyStopping._value),
            (ModelCheckpoint, "__init__"): refusing_uncalled(ModelCheckpoint.__init__),
            (ModelCheckpoint, "_monitor_has_value"): warning_without_validation(ModelCheckpoint._monitor_has_value),
            (StochasticWeightAveraging, "_begin"): begin_averaging,
            (range_test, "__post_init__"): lambda test: None,
            (range_test, "rate"): lambda test, step: rate(test, step) if test.num_training > 1 else test.min_lr,
        }
    )


def _warn_of_keys(monitor: Any, stats: dict[str, float], device: torch.device) -> None:
    unknown = sorted((monitor._filter_keys or set()) - set(stats))
    if unknown:
        messages.warn(
            f"DeviceStatsMonitor: filter_keys contains keys not found in the statistics of device '{device}': "
            f"{messages.names(unknown, 'and')}. Choose {messages.names(stats)}."
        )


def _replace_methods() -> None:
    from ...data.datamodule import DataModule
    from ...profilers.base import Profiler
    from ...trainer import arguments, default_callbacks
    from ...trainer.data_source import DataSource
    from ...trainer.loop import FitLoop
    from ...trainer.optimizers import ManagedOptimizer
    from ...trainer.state import RunState
    from ...trainer.trainer import Trainer
    from . import plugins

    placed: Any = Trainer._place
    values: Any = Trainer.logged_metrics
    around: Any = Profiler.around

    def place(trainer: Trainer, *args: Any) -> None:
        placed(trainer, *args)
        plugins.remember(trainer)

    replacements: dict[tuple[type, str], Any] = {
        (DataModule, "__str__"): datamodule_text,
        (FitLoop, "report_finished"): _refuse_more_epochs(FitLoop.report_finished),
        (FitLoop, "advise"): advising_train(FitLoop.advise),
        (DataSource, "load_evaluation"): advising_evaluation(DataSource.load_evaluation),
        (ManagedOptimizer, "__repr__"): lambda optimizer: f"Lightning{optimizer.optimizer!r}",
        (Profiler, "around"): lambda profiler, name, function: around(profiler, _action(name), function),
        (RunState, "__eq__"): _same_state,
        (Trainer, "_place"): place,
    }
    replacements[Trainer, "__init__"] = speak_again(Trainer.__init__)
    for name in ("fit", "validate", "test", "predict"):
        replacements[Trainer, name] = exiting(speak_again(getattr(Trainer, name)))
    arguments.check_overfitting = _overfitting_wins(arguments.check_overfitting)
    default_callbacks.is_logger = is_logger
    _replace(replacements)
    setattr(Trainer, "logged_metrics", property(lambda trainer: _logged(trainer, values.fget), doc=values.__doc__))  # noqa: B010


def _replace(replacements: Mapping[tuple[type, str], Any]) -> None:
    for (owner, name), changed in replacements.items():
        setattr(owner, name, functools.wraps(getattr(owner, name))(changed))


def _translate_errors() -> None:
    for module, classes in _RAISING.items():
        for name, methods in classes.items():
            owner: Any = getattr(import_module(f"paceline.{module}"), name)
            for method in methods.split():
                function = getattr(owner, method)
                setattr(owner, method, translated(function))
                if method == "__init__":
                    with suppress(NameError):  # for a type that only type checkers import
                        inspect.unwrap(function).__annotations__ = get_type_hints(function)


def _refuse_more_epochs(report_finished: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``report_finished`` to reject a checkpoint with more epochs than the run may have, as Lightning does."""

    def say(loop: Any) -> None:
        most, epochs = loop.run.trainer.max_epochs, loop.state.epoch + loop.state.epoch_done
        if loop.resumed is not None and -1 < most < epochs:
            raise ValueError(
                f"The checkpoint has {epochs} epochs, more than Trainer(max_epochs={most}). Raise max_epochs to "
                "continue."
            )
        report_finished(loop)

    return say


def _overfitting_wins(check: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``check`` to warn about limits that ``overfit_batches`` replaces."""

    def warn(overfit_batches: Any, **limits: Any) -> None:
        check(overfit_batches, fast_dev_run=limits.pop("fast_dev_run"))
        for name, value in limits.items() if overfit_batches else ():
            if value:
                messages.warn(f"Trainer(overfit_batches={overfit_batches!r}) replaces {name}={value!r}.")

    return warn


def _ordered(order: Callable[[list[Any]], list[Any]], callbacks: list[Any]) -> list[Any]:
    complete_mocks(callbacks)
    return order(callbacks)


def _action(name: str) -> str:
    for own, theirs in _ACTIONS.items():
        if name.startswith(own):
            return theirs + name.removeprefix(own)
    return name


def _logged(trainer: Any, sent: Callable[[Any], Mapping[str, float]]) -> dict[str, Tensor]:
    """Return the values for the loggers as tensors: those already sent, and newer ones from training steps."""
    found = {name: torch.tensor(value) for name, value in sent(trainer).items()}
    store, monitored = trainer.current_run.metrics, trainer.callback_metrics
    for stage, record in store.known():
        if stage == "train" and record.logger and record.on_step and record.step_key in monitored:
            found[record.step_key] = monitored[record.step_key]
    return found


def _same_state(state: Any, other: Any) -> bool:
    """Return True if two states agree in the kind of run, the stage and the status."""
    names = ("fn", "stage", "status")
    return type(other) is type(state) and all(getattr(state, name) == getattr(other, name) for name in names)


def _interruption(signum: int) -> BaseException:
    """Return the exception that stops a run after a signal."""
    return SIGTERMException(SIGTERMException.code) if signum == signal.SIGTERM else interruption(signum)
