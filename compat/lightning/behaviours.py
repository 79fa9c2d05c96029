"""Gives Paceline's classes the behavior that programs written for Lightning expect."""

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
from ...loggers.base import Logger
from ...processes.signals import interruption
from ...torch_private import APPLY
from ...trainer.module_hooks import ModuleHooks
from .exceptions import SIGTERMException, exiting, translated
from .testing import complete_mocks, is_logger
from .texts import advising_evaluation, advising_train, datamodule_text, hparams_text, print_results, speak_again

#: Classes in Paceline's modules, with the methods whose errors programs catch as Lightning's exceptions.
_RAISING = {
    "trainer.trainer": {"Trainer": "__init__ fit validate test predict save_checkpoint"},
    "trainer.module": {
        "TrainingModule": ("clip_gradients log log_dict manual_backward optimizers lr_schedulers save_hyperparameters")
    },
    "callbacks.early_stopping": {"EarlyStopping": "__init__"},
    "callbacks.finetuning": {"BackboneFinetuning": "__init__"},
    "callbacks.gradient_accumulation_scheduler": {"GradientAccumulationScheduler": "__init__"},
    "callbacks.lr_monitor": {"LearningRateMonitor": "__init__"},
    "callbacks.model_checkpoint": {"ModelCheckpoint": "__init__"},
    "callbacks.model_pruning": {"ModelPruning": "__init__ setup"},
    "callbacks.prediction_writer": {"BasePredictionWriter": "__init__"},
    "callbacks.stochastic_weight_averaging": {"StochasticWeightAveraging": "__init__"},
    "callbacks.timer": {"Timer": "__init__"},
    "cli.argument_parser": {"ArgumentParser": "__init__ add_lightning_class_args"},
    "cli.trainer_cli": {"TrainerCLI": "__init__", "SaveConfigCallback": "__init__ setup"},
    "profilers.pytorch": {"PyTorchProfiler": "__init__"},
    "strategies.precision.mixed": {"MixedPrecision": "__init__"},
    "tuner.tuner": {"Tuner": "scale_batch_size lr_find"},
}
#: Prefixes of profiled actions' names in Paceline, and the corresponding prefixes in Lightning.
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


def install(version: str) -> None:
    """Apply the behavior of Lightning ``version`` to Paceline's classes."""
    from ...checkpoint import file_names, instantiate, lightning_format
    from ...data import loaders
    from ...strategies.precision import base as precision
    from ...trainer import checkpoint_contents, default_callbacks, start_run, stopping
    from ...trainer import hooks as trainer_hooks
    from . import (
        attributes,
        finetuning,
        hooks,
        lenient,
        lr_find,
        own_loops,
        plugins,
        saving_choices,
        stopping_choices,
        views,
    )

    start_run.log_hyperparameters = _then_saving(start_run.log_hyperparameters)
    users: list[Any] = [default_callbacks, start_run]
    for user in users:
        user.order = functools.partial(_ordered, user.order)
        user.check_state_keys = translated(user.check_state_keys, RuntimeError)
    default_callbacks.ENTRY_POINTS += ["lightning.pytorch.callbacks_factory", "pytorch_lightning.callbacks_factory"]
    instantiate.MARK = "lightning.pytorch.cli.instantiate_module"
    lightning_format.LAYOUT_VERSION = version
    file_names.MISSING = 0
    stopping.interruption = _interruption
    loaders.is_loader_collection = _lists_are_collections(loaders.is_loader_collection)
    precision.convert = _convert_floats
    hooks.list_only_hooks()
    trainer_hooks.overridden = hooks.as_lightning(trainer_hooks.overridden)
    checkpoint_contents.call = hooks.loading_as_lightning(checkpoint_contents.call)
    lr_find.install()
    plugins.install()
    views.install()
    own_loops.install()
    for module, name in _STRATEGIES.items():
        plugins.take_arguments(getattr(import_module(f"paceline.{module}"), name))
    attributes.install()
    lenient.install()
    _change_loggers()
    _change_callbacks()
    for part in (saving_choices, stopping_choices, finetuning):
        part.install()
    _change_averaging()
    _change_summaries()
    _change_tuner()
    _replace_methods()
    _translate_errors()


def _change_loggers() -> None:
    from ...loggers.csv import CSVLogger, ExperimentWriter
    from ...loggers.mlflow import MLFlowLogger
    from ...loggers.tensorboard import TensorBoardLogger
    from ...trainer.run import Run
    from .csv_files import deleting_old_files, log_metrics, noting_old_files

    for logger in (CSVLogger, MLFlowLogger, TensorBoardLogger):
        defaults = logger.__init__.__defaults__ or ()
        logger.__init__.__defaults__ = tuple("lightning_logs" if one == "paceline_logs" else one for one in defaults)
    ExperimentWriter.first_columns = ("step",)
    _replace(
        {
            (CSVLogger, "__init__"): noting_old_files(CSVLogger.__init__),
            (CSVLogger, "_open"): deleting_old_files(CSVLogger._open),
            (CSVLogger, "log_metrics"): log_metrics,
        }
    )
    save = TensorBoardLogger.save

    def save_run(logger: TensorBoardLogger) -> None:
        _ = logger.experiment  # creates the run's folder
        save(logger)

    _replace({(TensorBoardLogger, "save"): save_run})
    log_dir: Any = Run.log_dir
    setattr(Run, "log_dir", property(lambda run: _log_dir(run, log_dir.fget), doc=log_dir.__doc__))  # noqa: B010


def _change_callbacks() -> None:
    from ...callbacks.checkpoint_retention import CheckpointKeeper
    from ...callbacks.device_stats_monitor import DeviceStatsMonitor
    from ...callbacks.early_stopping import EarlyStopping
    from ...callbacks.finetuning import BackboneFinetuning
    from ...callbacks.lr_monitor import LearningRateMonitor
    from ...callbacks.model_checkpoint import ModelCheckpoint
    from ...callbacks.stochastic_weight_averaging import StochasticWeightAveraging
    from ...callbacks.timer import Timer
    from . import lenient
    from .callbacks import (
        due_without_scheduler,
        in_folder_of_logger,
        raising_runtime_error,
        refusing_uncalled,
        stats_hooks,
        warning_without_validation,
        with_absolute_paths,
    )

    tests: Any = import_module("paceline.tuner.lr_range_test")
    range_test, curve = tests.RangeTest, tests.LossCurve
    begin: Any = StochasticWeightAveraging._begin
    take_in: Any = CheckpointKeeper._take_in
    without_update = curve.skip

    def rank(keeper: Any, path: str, score: Tensor | None, gone: Any) -> None:
        if score is not None and score.isnan():
            score = keeper.current_score = torch.tensor(float("inf" if keeper.mode == "min" else "-inf"))
        take_in(keeper, path, score, gone)

    def skip_step(one: Any) -> bool:
        if not one.run.state.stepped:
            return without_update(one)
        results = one.found.results
        results["lr"].append(one.rate(len(results["lr"])))
        results["loss"].append(float("nan"))
        return len(results["lr"]) >= one.found.num_training

    def begin_averaging(callback: Any, trainer: Any, module: Any) -> None:
        begin(callback, trainer, module)
        for group in trainer.optimizers[0].param_groups:
            group["initial_lr"] = group["swa_lr"]

    _replace(
        {
            (CheckpointKeeper, "_folder"): in_folder_of_logger(CheckpointKeeper._folder),
            (CheckpointKeeper, "_take_in"): rank,
            (CheckpointKeeper, "state_dict"): with_absolute_paths(CheckpointKeeper.state_dict),
            (DeviceStatsMonitor, "_check_keys"): _warn_of_keys,
            (EarlyStopping, "_value"): raising_runtime_error(EarlyStopping._value),
            (LearningRateMonitor, "_due_at_epoch"): due_without_scheduler(LearningRateMonitor._due_at_epoch),
            (ModelCheckpoint, "__init__"): refusing_uncalled(ModelCheckpoint.__init__),
            (ModelCheckpoint, "_monitor_has_value"): warning_without_validation(ModelCheckpoint._monitor_has_value),
            (StochasticWeightAveraging, "_begin"): begin_averaging,
            (Timer, "on_validation_start"): lambda timer, *_: timer._begin("validate"),
            (Timer, "on_validation_end"): lambda timer, *_: timer._finish("validate"),
            (curve, "skip"): skip_step,
            (range_test, "__post_init__"): lenient.check_mode,
        }
    )

    BackboneFinetuning._every_optimizer = True
    StochasticWeightAveraging._before_epochs = True
    for name, hook in stats_hooks().items():
        setattr(DeviceStatsMonitor, name, functools.wraps(getattr(DeviceStatsMonitor, name))(hook))


def _change_averaging() -> None:
    from ...callbacks.weight_averaging import EMAWeightAveraging

    of_epochs = EMAWeightAveraging.should_update

    def should_update(callback: Any, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is None:
            return of_epochs(callback, step_idx, epoch_idx)
        return step_idx >= (callback.update_starting_at_step or 0) and step_idx % callback.update_every_n_steps == 0

    _replace({(EMAWeightAveraging, "should_update"): should_update})


def _change_summaries() -> None:
    from ...callbacks.model_summary import ModelSummary
    from .callbacks import handing_over_columns, keep_keywords, print_columns

    _replace(
        {
            (ModelSummary, "__init__"): keep_keywords(ModelSummary.__init__),
            (ModelSummary, "_hand_over"): handing_over_columns(ModelSummary._hand_over),
        }
    )
    setattr(ModelSummary, "summarize", staticmethod(print_columns))  # noqa: B010


def _warn_of_keys(monitor: Any, stats: dict[str, float], device: torch.device) -> None:
    unknown = sorted((monitor._filter_keys or set()) - set(stats))
    if unknown:
        messages.warn(
            f"DeviceStatsMonitor: filter_keys contains keys not found in the statistics of device '{device}': "
            f"{messages.names(unknown, 'and')}. Choose {messages.names(stats)}."
        )


def _replace_methods() -> None:
    from ...checkpoint.hyperparameters import AttributeDict
    from ...data.datamodule import DataModule
    from ...profilers.base import Profiler
    from ...trainer import default_callbacks, loop, trainer
    from ...trainer.data_source import DataSource
    from ...trainer.evaluation import EvalLoop
    from ...trainer.loop import FitLoop
    from ...trainer.lr_schedules import Schedules
    from ...trainer.metrics import MetricStore
    from ...trainer.optimizers import ManagedOptimizer
    from ...trainer.run import Run
    from ...trainer.state import RunState
    from ...trainer.step import ClosureStep, FreeStep, ManualStep, TrainStep
    from ...trainer.trainer import Trainer
    from . import plugins

    placed: Any = Trainer._place
    values: Any = Trainer.logged_metrics
    around: Any = Profiler.around

    def place(trainer: Trainer, *args: Any) -> None:
        placed(trainer, *args)
        plugins.remember(trainer)

    replacements: dict[tuple[type, str], Any] = {
        (AttributeDict, "__repr__"): hparams_text,
        (ClosureStep, "__init__"): _counting_unstepped(ClosureStep.__init__),
        (ClosureStep, "refuse"): lambda step, why: messages.warn(why),
        (ClosureStep, "restart"): lambda step: step.clear(step.optimizer) if step.state.window else None,
        (DataModule, "__str__"): datamodule_text,
        (EvalLoop, "refuse_empty"): lambda loop, why: messages.warn(why),
        (EvalLoop, "switch"): _switching(EvalLoop.switch),
        (FitLoop, "report_finished"): _refuse_more_epochs(FitLoop.report_finished),
        (FitLoop, "advise"): advising_train(FitLoop.advise),
        (FitLoop, "refuse_empty"): _warn_of_empty,
        (DataSource, "load_evaluation"): advising_evaluation(DataSource.load_evaluation),
        (ManagedOptimizer, "__repr__"): lambda optimizer: f"Lightning{optimizer.optimizer!r}",
        (ManagedOptimizer, "step"): _returning(ManagedOptimizer.step),
        (ManagedOptimizer, "zero_grad"): _zero_grad,
        (MetricStore, "epoch_of_eval_step"): lambda store: None,
        (ModuleHooks, "on_validation_model_zero_grad"): lambda module: module.zero_grad(),
        (Profiler, "around"): lambda profiler, name, function: around(profiler, _action(name), function),
        (RunState, "__eq__"): _same_state,
        (RunState, "x_axis"): _x_axis,
        (Schedules, "steps"): lambda schedules: schedules.run.state.batch_idx + 1,
        **{(kind, "__call__"): _never_none(kind.__call__) for kind in (ClosureStep, FreeStep)},
        (ManualStep, "__call__"): _counting_batches(_never_none(ManualStep.__call__)),
        (TrainStep, "skip_loss"): _count_without_loss,
        (Trainer, "_place"): place,
        (Run, "send_metrics"): _then_saving(Run.send_metrics),
    }
    setattr(ModuleHooks, "fabric", None)  # noqa: B010 - Fabric.setup sets it on instances
    replacements[Trainer, "__init__"] = speak_again(Trainer.__init__)
    for name in ("fit", "validate", "test", "predict"):
        replacements[Trainer, name] = exiting(speak_again(getattr(Trainer, name)))
    trainer.show_results = print_results
    loop.choose_step = _clearing_first(loop.choose_step)
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
                also = (ValueError,) if method in ("log", "log_dict") else ()  # Paceline raises a TypeError here
                setattr(owner, method, translated(function, *also))
                if method == "__init__":
                    with suppress(NameError):  # raised for a type that only type checkers import
                        inspect.unwrap(function).__annotations__ = get_type_hints(function)


def _refuse_more_epochs(report_finished: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``report_finished`` to reject a checkpoint from beyond the run's ``max_epochs``, as Lightning does."""

    def say(loop: Any) -> None:
        most, epochs = loop.run.trainer.max_epochs, loop.state.epoch + loop.state.epoch_done
        if loop.resumed is not None and -1 < most < epochs:
            raise ValueError(
                f"The checkpoint was saved after {epochs} epochs, which is more than Trainer(max_epochs={most}) "
                "allows. Raise max_epochs to continue."
            )
        report_finished(loop)

    return say


def _ordered(order: Callable[[list[Any]], list[Any]], callbacks: list[Any]) -> list[Any]:
    complete_mocks(callbacks)
    return order(callbacks)


def _action(name: str) -> str:
    for own, theirs in _ACTIONS.items():
        if name.startswith(own):
            return theirs + name.removeprefix(own)
    return name


def _logged(trainer: Any, sent: Callable[[Any], Mapping[str, float]]) -> dict[str, Tensor]:
    """Return the values for the loggers as tensors: values already sent, and newer values from training steps."""
    found = {name: torch.tensor(value) for name, value in sent(trainer).items()}
    store, monitored = trainer.current_run.metrics, trainer.callback_metrics
    for stage, record in store.known():
        if stage == "train" and record.logger and record.on_step and record.step_key in monitored:
            found[record.step_key] = monitored[record.step_key]
    return found


def _log_dir(run: Any, own: Callable[[Any], str | None]) -> str | None:
    """Return the run's folder. For a program's own logger without a ``log_dir``, this is the logger's ``save_dir``."""
    logger = run.trainer.logger
    found = own(run)
    return logger.save_dir if found is None and isinstance(logger, Logger) else found


def _warn_of_empty(loop: Any, why: str) -> None:
    """Warn about an epoch without batches; raise an error if the run would never end."""
    if loop.run.trainer.max_epochs == -1:
        raise RuntimeError(why)
    messages.warn(why)


def _lists_are_collections(is_collection: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Wrap ``is_loader_collection`` to also return True for a list of lists, because each inner list is a loader."""

    def check(loaders: Any) -> bool:
        lists = isinstance(loaders, (list, tuple)) and bool(loaders)
        return is_collection(loaders) or (lists and all(isinstance(one, (list, tuple)) for one in loaders))

    return check


def _convert_floats(module: torch.nn.Module, wanted: torch.dtype) -> torch.nn.Module:
    """Convert a module's floating-point parameters and buffers; leave complex ones unchanged."""
    return getattr(module, APPLY)(lambda one: one.to(wanted) if one.is_floating_point() else one)


def _change_tuner() -> None:
    trials: Any = import_module("paceline.tuner.batch_size").Trials
    check_size = trials.check_size

    def check(trial: Any, *args: Any) -> None:
        try:
            check_size(trial, *args)
        except RuntimeError as error:
            messages.warn_once(str(error))

    _replace({(trials, "check_size"): check})


def _switching(switch: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    """Wrap ``switch`` to restore the module's modes after a prediction without calling ``on_predict_model_train``."""

    def change(loop: Any, what: str) -> None:
        if (loop.kind, what) == ("predict", "train"):
            ModuleHooks.on_predict_model_train(loop.run.module)
        else:
            switch(loop, what)

    return change


def _never_none(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a step to return ``{}`` for a batch if ``training_step`` returned None."""

    def call(one: Any, batch: Any, batch_idx: int) -> Any:
        output = step(one, batch, batch_idx)
        return {} if output is None and batch is not None else output

    return call


def _counting_batches(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a manual optimization step so that the loggers count every batch, even if no optimizer stepped."""

    def call(one: Any, batch: Any, batch_idx: int) -> Any:
        output = step(one, batch, batch_idx)
        if not one.state.stepped:
            one.state.stepped = True
            one.state.updates += 1
        return output

    return call


def _counting_unstepped(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a step's constructor so that an ``optimizer_step`` that only runs the closure counts as an update."""

    def call(one: Any, *args: Any) -> None:
        init(one, *args)
        state, managed, step = one.state, one.managed, one.optimizer_step

        def count(*arguments: Any) -> None:
            step(*arguments)
            if state.window and managed.stepped_at != state.batches:
                managed.stepped_at, state.stepped = state.batches, True
                state.global_step += 1
                state.updates += 1

        one.optimizer_step = count

    return call


def _then_saving(log: Callable[..., None]) -> Callable[..., None]:
    """Wrap a logging function to call the ``save`` methods of the program's own loggers afterward, on rank 0."""

    def call(owner: Any, *args: Any) -> None:
        log(owner, *args)
        trainer = getattr(owner, "trainer", owner)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            save = getattr(type(logger), "save", None)
            if save is None or not save.__module__.startswith("paceline."):
                logger.save()

    return call


def _x_axis(state: Any, updates: int) -> int:
    """Return the step at which Lightning logs values.

    During a fit, this is the index of the latest update. Outside a fit, and during a validation inside an accumulation
    window, this is the index of the next update.
    """
    between = state.window and state.stage != "train"
    return updates if between or state.fn != "fit" else max(updates - 1, 0)


def _clearing_first(choose_step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``choose_step`` to clear gradients before a window's first backward pass instead of after an update."""

    def choose(*args: Any) -> Any:
        step = choose_step(*args)
        if hasattr(step, "clearing"):
            step.after_step = ()
            step.before_backward = (lambda loss: step.state.window or _clear(step), *step.before_backward)
        return step

    return choose


def _clear(step: Any) -> None:
    for hook in step.clearing:
        hook(step.optimizer)


def _count_without_loss(step: Any) -> dict[str, Any]:
    """Count a batch toward the window although ``training_step`` returned None, so that the batch adds no gradients."""
    state = step.state
    if not state.window:
        _clear(step)
    state.window += 1
    complete = state.window >= step.accumulate or state.is_last_batch
    if complete and not step.scales:
        step.update()
    elif complete:  # a loss scaler rejects a step without gradients
        state.window, state.stepped = 0, True
        state.global_step += 1
        state.updates += 1
    return {}


def _returning(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``step`` to return the result of the original optimizer's ``step``, or None if the step was skipped."""

    def call(managed: Any, closure: Any = None, **arguments: Any) -> Any:
        optimizer, found = managed.optimizer, [None]
        own, before = optimizer.step, vars(optimizer).get("step")

        @functools.wraps(own)
        def keeping(*args: Any, **kwargs: Any) -> Any:
            found[0] = own(*args, **kwargs)
            return found[0]

        optimizer.step = keeping
        try:
            step(managed, closure, **arguments)
        finally:
            del optimizer.step
            if before is not None:
                optimizer.step = before
        return found[0]

    return call


def _zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """Clear the gradients without ``on_before_zero_grad``."""
    optimizer.optimizer.zero_grad(*args, **kwargs)


def _same_state(state: Any, other: Any) -> bool:
    """Return True if two states have the same function, stage and status."""
    names = ("fn", "stage", "status")
    return type(other) is type(state) and all(getattr(state, name) == getattr(other, name) for name in names)


def _interruption(signum: int) -> BaseException:
    """Return the exception that stops a run after a signal."""
    return SIGTERMException(SIGTERMException.code) if signum == signal.SIGTERM else interruption(signum)
