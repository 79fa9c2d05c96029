"""Views of a run, under the names of Lightning's private objects that libraries read.

The first time a name is read, a debug message says which public name to use instead. Reading a name that has no meaning
in Paceline raises an AttributeError that says what to use instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import torch

from ... import messages
from ...data.datamodule import DataModule
from ...processes.accelerators import Accelerator, AcceleratorRegistry
from ...processes.environments import ClusterEnvironment, LocalEnvironment
from ...strategies.base import Strategy
from ...strategies.choose import choose_strategy
from ...strategies.precision.base import Precision
from ...strategies.sync_batch_norm import TorchSyncBatchNorm
from ...trainer import data_source, default_callbacks
from ...trainer.module import TrainingModule
from ...trainer.plugins import sort_plugins
from ...trainer.trainer import Trainer
from . import restoring
from .results import results
from .texts import with_tensors

#: A function that reads a name's value, and Paceline's own name for that value.
Read = tuple[Callable[[Any], Any], str]


class View:
    """A view of one part of Lightning's Trainer, with values from Paceline's Trainer.

    Attributes:
        place: the expression by which programs access the part.
        instead: advice for reading names that this part does not have.
        reads: the names that can be read.
        writes: the names that can be set, and the Trainer attribute that each one sets.
    """

    place: ClassVar[str]
    instead: ClassVar[str]
    reads: ClassVar[Mapping[str, Read]]
    writes: ClassVar[Mapping[str, str]] = {}

    def __init__(self, trainer: Trainer) -> None:
        vars(self)["trainer"] = trainer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self.reads:
            raise AttributeError(
                f"{self.place}.{name} is private to Lightning, and Paceline does not have it. {self.instead}"
            )
        read, public = self.reads[name]
        messages.debug_once(f"{self.place}.{name} is private to Lightning. Read {public} instead.")
        return read(vars(self)["trainer"])

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.isidentifier():  # a note of the program's own; no code reads it as an attribute
            vars(self)[name] = value
            return
        if name not in self.writes:
            raise AttributeError(
                f"{self.place}.{name} cannot be set, because it only reflects the state of a run. {self.instead}"
            )
        setattr(vars(self)["trainer"], self.writes[name], value)

    def __dir__(self) -> list[str]:
        return sorted(self.reads)

    def __repr__(self) -> str:
        return f"<{self.place}, by Paceline>"


class Progress:
    """Read-only counts of batches, epochs or steps that were started and finished, in this run and in total.

    Attributes:
        total: the counts over all epochs and runs; by default equal to :attr:`current`, because a resumed run continues
            its counters.
        **more: other attributes of Lightning's corresponding class.
    """

    ready: int
    started: int
    completed: int
    processed: int
    total: Progress

    def __init__(
        self, begun: int, finished: int, processed: int | None = None, total: Progress | None = None, **more: Any
    ) -> None:
        processed = finished if processed is None else processed
        vars(self).update(ready=begun, started=begun, completed=finished, processed=processed)
        vars(self).update(total=total or self, **more)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"The progress of a loop cannot be set ({name} = {value!r}), because it only reflects the state of a run. "
            "To continue a saved run, pass ckpt_path to fit. To train for fewer epochs, pass max_epochs to the "
            "Trainer."
        )

    @property
    def current(self) -> Progress:
        """The counts in this run or, for batches, in this epoch."""
        return self

    def __repr__(self) -> str:
        return f"Progress(ready={self.ready}, completed={self.completed})"


def _is_training(trainer: Trainer) -> bool:
    return trainer.state.fn == "fit"


def _epochs(trainer: Trainer) -> Progress:
    state = trainer.state
    return Progress(state.epoch + _is_training(trainer), state.epoch, state.epoch + state.epoch_done)


def _batches(trainer: Trainer) -> Progress:
    """Return the counts of training batches; between epochs, those of the last epoch."""
    state, in_epoch = trainer.state, trainer.num_training_batches
    total = Progress(state.batches + (state.batch_idx >= state.next_batch), state.batches)
    if state.batch_idx < 0 and state.batches and in_epoch != float("inf"):
        return Progress(int(in_epoch), int(in_epoch), total=total, is_last_batch=True)
    return Progress(state.batch_idx + 1, state.next_batch, total=total, is_last_batch=state.is_last_batch)


def _is_done(trainer: Trainer) -> bool:
    """Return True if the fit has reached a limit, has nothing to train, or is stopping because of ``should_stop``."""
    fit, state = trainer.current_run.fit, trainer.state
    if fit is None:
        return False
    epochs = state.epoch + state.epoch_done
    may_stop = epochs >= (trainer.min_epochs or 0) and state.global_step >= (trainer.min_steps or 0)
    return fit.at_limit() or trainer.num_training_batches == 0 or (trainer.should_stop and may_stop)


def _epoch_is_done(trainer: Trainer) -> bool:
    """Return True from the start of an epoch's last batch onward, and after the fit."""
    return _is_done(trainer) or trainer.state.is_last_batch


def _batch_idx(trainer: Trainer) -> int:
    return _batches(trainer).ready - 1


def _total_batch_idx(trainer: Trainer) -> int:
    state = trainer.state
    return state.batches - (state.next_batch > state.batch_idx)


def _steps(trainer: Trainer) -> Progress:
    step = trainer.state.global_step
    of_optimizer = SimpleNamespace(step=Progress(step, step), zero_grad=Progress(step, step))
    return Progress(step, step, optimizer_steps=step, optimizer=of_optimizer)


def _validates_now(trainer: Trainer) -> Callable[..., bool]:
    """Return a function that returns True if validation follows the current batch."""

    def due(*_: Any) -> bool:
        fit = trainer.current_run.fit
        if fit is None or fit.validation.every is None or trainer.val_check_seconds is not None:
            return False
        return fit.validation.due(trainer.state.batch_idx, "")

    return due


def _returns_predictions(trainer: Trainer) -> bool:
    """Return True unless the latest call was a ``predict`` that does not return its predictions."""
    request = trainer.current_run.request
    return request is None or request.fn != "predict" or request.keep_predictions


def _prints_results(trainer: Trainer) -> bool:
    """Return True if the latest call of an entry point prints results."""
    request = trainer.current_run.request
    return request is not None and request.show_results is not None


def _evaluation_loop(trainer: Trainer) -> EvaluationLoop:
    return TestLoop(trainer) if trainer.state.fn == "test" else ValidationLoop(trainer)


class LoaderSource:
    """The ``_data_source`` of a loop: where the loaders of a stage come from.

    Attributes:
        instance: the loaders that were passed, or the module or DataModule that creates them.
        name: the method that creates them.
    """

    def __init__(self, trainer: Trainer, stage: str) -> None:
        self._source = source = trainer.current_run.source
        self._stage, self.name = stage, data_source.HOOK[stage]
        hook = source.hook(stage)
        self.instance = source.given.get(stage)
        if self.instance is None:
            self.instance = trainer.training_module if hook is None else getattr(hook, "__self__", None)

    def is_defined(self) -> bool:
        """Return True if there are loaders."""
        return self._source.defined(self._stage)

    def is_module(self) -> bool:
        """Return True if a module or DataModule creates the loaders."""
        return isinstance(self.instance, (TrainingModule, DataModule))

    def dataloader(self) -> Any:
        """Return the loaders that were passed, or newly created ones."""
        return self._source.load(self._stage)


def _data_source(stage: str) -> Read:
    return lambda trainer: LoaderSource(trainer, stage), "trainer.train_dataloader and trainer.num_val_batches"


_LIMITS: dict[str, Read] = {
    name: (lambda trainer, name=name: getattr(trainer, name), f"trainer.{name}")
    for name in ("max_epochs", "min_epochs", "max_steps", "min_steps")
}


class Optimization(View):
    """View of ``epoch_loop.automatic_optimization`` and ``epoch_loop.manual_optimization``."""

    place = "trainer.fit_loop.epoch_loop.manual_optimization"
    instead = (
        "Read trainer.global_step for the number of steps. To run code in each step, override optimizer_step or a "
        "hook around it."
    )
    reads: ClassVar[Mapping[str, Read]] = {
        "optim_step_progress": (_steps, "trainer.global_step"),
        "optim_progress": (_steps, "trainer.global_step"),
    }


class EpochLoop(View):
    """View of ``fit_loop.epoch_loop``."""

    place = "trainer.fit_loop.epoch_loop"
    instead = "Use the arguments of on_train_batch_start, trainer.is_last_batch and trainer.state instead."
    writes: ClassVar[Mapping[str, str]] = {"max_steps": "max_steps", "min_steps": "min_steps"}
    reads: ClassVar[Mapping[str, Read]] = {
        "batch_idx": (_batch_idx, "trainer.state.batch_idx"),
        "total_batch_idx": (_total_batch_idx, "trainer.state.batches"),
        "global_step": (lambda trainer: trainer.global_step, "trainer.global_step"),
        "batch_progress": (_batches, "trainer.state.batch_idx"),
        "val_loop": (lambda trainer: ValidationLoop(trainer), "trainer.num_val_batches"),
        "_batches_that_stepped": (lambda trainer: trainer.state.updates, "trainer.state.updates"),
        "_should_check_val_fx": (_validates_now, "on_validation_start"),
        "_should_check_val_epoch": (
            lambda trainer: lambda: trainer.enable_validation,
            "trainer.enable_validation",
        ),
        "automatic_optimization": (Optimization, "trainer.global_step"),
        "manual_optimization": (Optimization, "trainer.global_step"),
        "max_steps": _LIMITS["max_steps"],
        "min_steps": _LIMITS["min_steps"],
        "done": (_epoch_is_done, "trainer.is_last_batch"),
        "restarting": (lambda trainer: trainer.current_run.resumes, "trainer.ckpt_path"),
    }


class FitLoopView(View):
    """View of ``trainer.fit_loop``."""

    place = "trainer.fit_loop"
    instead = "Use trainer.state, trainer.current_run and a Callback's hooks instead."
    writes: ClassVar[Mapping[str, str]] = {name: name for name in _LIMITS}
    reads: ClassVar[Mapping[str, Read]] = {
        **_LIMITS,
        "done": (_is_done, "trainer.should_stop"),
        "skip": (lambda trainer: _is_done(trainer) or trainer.limit_train_batches == 0, "trainer.should_stop"),
        "epoch_loop": (EpochLoop, "trainer.state"),
        "epoch_progress": (_epochs, "trainer.current_epoch"),
        "max_batches": (lambda trainer: trainer.num_training_batches, "trainer.num_training_batches"),
        "batch_idx": (_batch_idx, "trainer.state.batch_idx"),
        "total_batch_idx": (_total_batch_idx, "trainer.state.batches"),
        "global_step": (lambda trainer: trainer.global_step, "trainer.global_step"),
        "restarting": (lambda trainer: trainer.current_run.resumes, "trainer.ckpt_path"),
        "_combined_loader": (lambda trainer: trainer.train_dataloader, "trainer.train_dataloader"),
        "setup_data": (lambda trainer: trainer.current_run.source.train, "trainer.train_dataloader"),
        "_data_source": _data_source("train"),
    }


class EvaluationLoop(View):
    """View of a validation or test loop. Its ``_print_results`` can be set to another function."""

    def __setattr__(self, name: str, value: Any) -> None:
        trainer = vars(self)["trainer"]
        if name != "_print_results":
            super().__setattr__(name, value)
        elif trainer.state.fn is None or trainer.state.status != "running":
            raise AttributeError(
                f"{self.place}._print_results can be set only while validate or test is running, for example in "
                "on_validation_start. To print nothing, pass verbose=False."
            )
        elif _prints_results(trainer):
            trainer.current_run.request.show_results = with_tensors(value)


class ValidationLoop(EvaluationLoop):
    """View of ``trainer.validate_loop`` and of a fit's validation loop."""

    place = "trainer.validate_loop"
    instead = "Use trainer.num_val_batches, trainer.callback_metrics and on_validation_batch_end instead."
    reads: ClassVar[Mapping[str, Read]] = {
        "max_batches": (lambda trainer: trainer.num_val_batches, "trainer.num_val_batches"),
        "_max_batches": (lambda trainer: trainer.num_val_batches, "trainer.num_val_batches"),
        "epoch_loop": (lambda trainer: ValidationLoop(trainer), "trainer.num_val_batches"),
        "batch_progress": (lambda trainer: Progress(trainer.state.evaluated, trainer.state.evaluated), "batch_idx"),
        "verbose": (_prints_results, "the argument verbose of validate"),
        "_combined_loader": (lambda trainer: trainer.val_dataloaders, "trainer.val_dataloaders"),
        "_data_source": _data_source("validate"),
    }


class TestLoop(EvaluationLoop):
    """View of ``trainer.test_loop``."""

    place = "trainer.test_loop"
    instead = "Use trainer.num_test_batches, trainer.callback_metrics and on_test_batch_end instead."
    reads: ClassVar[Mapping[str, Read]] = {
        "max_batches": (lambda trainer: trainer.num_test_batches, "trainer.num_test_batches"),
        "verbose": (_prints_results, "the argument verbose of test"),
        "_combined_loader": (lambda trainer: trainer.test_dataloaders, "trainer.test_dataloaders"),
        "_data_source": _data_source("test"),
    }


class PredictLoop(View):
    """View of ``trainer.predict_loop``."""

    place = "trainer.predict_loop"
    instead = "Use trainer.predictions, trainer.predict_batch_indices and on_predict_batch_end instead."
    reads: ClassVar[Mapping[str, Read]] = {
        "return_predictions": (_returns_predictions, "the argument return_predictions of predict"),
        "predictions": (lambda trainer: trainer.predictions, "trainer.predictions"),
        "epoch_batch_indices": (lambda trainer: trainer.predict_batch_indices, "trainer.predict_batch_indices"),
        "current_batch_indices": (lambda trainer: trainer.current_batch_indices, "trainer.current_batch_indices"),
        "max_batches": (lambda trainer: trainer.num_predict_batches, "trainer.num_predict_batches"),
        "_combined_loader": (lambda trainer: trainer.predict_dataloaders, "trainer.predict_dataloaders"),
        "_data_source": _data_source("predict"),
    }


class DataConnector(View):
    """View of ``trainer._data_connector``."""

    place = "trainer._data_connector"
    instead = (
        "Pass loaders or a DataModule to trainer.fit, validate, test or predict. To get the DataModule, read "
        "trainer.datamodule."
    )
    reads: ClassVar[Mapping[str, Read]] = {}


class CheckpointConnector(View):
    """View of ``trainer._checkpoint_connector``."""

    place = "trainer._checkpoint_connector"
    instead = "Use trainer.save_checkpoint(path), or pass ckpt_path= to fit, validate, test or predict."
    reads: ClassVar[Mapping[str, Read]] = {
        "dump_checkpoint": (
            lambda trainer: lambda weights_only=False: trainer.saver.gathered(bool(weights_only))[0],
            "trainer.save_checkpoint(path)",
        ),
        "save_checkpoint": (lambda trainer: trainer.save_checkpoint, "trainer.save_checkpoint"),
        "_loaded_checkpoint": (restoring.loaded, "torch.load"),
    } | {
        name: (lambda trainer, restore=restore: functools.partial(restore, trainer), "the argument ckpt_path of fit")
        for name, restore in restoring.STEPS.items()
    }

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_loaded_checkpoint":
            restoring.take(vars(self)["trainer"], value)
        else:
            super().__setattr__(name, value)


def _is_logging(trainer: Trainer) -> bool:
    """Return True if the loggers get the current batch's values."""
    if trainer.log_every_n_steps == 0:
        return False
    state = trainer.state
    begun = state.updates + 1 - state.stepped  # the update that this batch belongs to
    return begun % trainer.log_every_n_steps == 0 or trainer.should_stop


class LoggerConnector(View):
    """View of ``trainer._logger_connector``."""

    place = "trainer._logger_connector"
    instead = "Read values from trainer.callback_metrics, logged_metrics or progress_bar_metrics."
    reads: ClassVar[Mapping[str, Read]] = {
        name: (lambda trainer, name=name: getattr(trainer, name), f"trainer.{name}")
        for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics", "log_metrics")
    } | {"should_update_logs": (_is_logging, "trainer.log_every_n_steps")}


class CallbackConnector(View):
    """View of ``trainer._callback_connector``."""

    place = "trainer._callback_connector"
    instead = "Read trainer.callbacks, which lists the callbacks in the order in which they are called."
    reads: ClassVar[Mapping[str, Read]] = {
        "_reorder_callbacks": (lambda trainer: default_callbacks.order, "trainer.callbacks"),
    }


class _Unpatched(type):
    """Metaclass that warns of methods that a program replaces on the class, because Paceline never calls them."""

    def __setattr__(cls, name: str, value: Any) -> None:
        messages.warn_once(
            f"{cls.__name__}.{name} was replaced by {messages.a(value)}, which Paceline never calls. Pass a Strategy "
            "to Trainer(strategy=...), or a Precision to Trainer(plugins=...)."
        )
        super().__setattr__(name, value)


class AcceleratorConnector(metaclass=_Unpatched):
    """``trainer._accelerator_connector``: the strategy and the plugins that a Trainer chose, or would choose.

    The constructor accepts some of the Trainer's arguments.

    Attributes:
        strategy: the chosen Strategy.
    """

    def __init__(
        self,
        devices: Any = "auto",
        num_nodes: int = 1,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        plugins: Any = None,
        precision: Any = None,
        sync_batchnorm: bool = False,
        benchmark: bool | None = None,
        use_distributed_sampler: bool = True,
        deterministic: Any = None,
    ) -> None:
        given = sort_plugins(plugins)
        self.strategy: Strategy = choose_strategy(
            strategy, accelerator, devices, num_nodes, precision, given.precision, environment=given.environment
        )
        self.use_distributed_sampler = use_distributed_sampler
        self.checkpoint_io: Any = given.checkpoint_io
        self._layer_sync = given.layer_sync or (TorchSyncBatchNorm() if sync_batchnorm else None)

    @classmethod
    def of(cls, trainer: Trainer) -> AcceleratorConnector:
        """Return the connector of an existing Trainer."""
        messages.debug_once(
            "trainer._accelerator_connector is private to Lightning. Read trainer.strategy, trainer.accelerator, "
            "trainer.device_ids and trainer.precision_plugin instead."
        )
        one = object.__new__(cls)
        one.strategy, one.use_distributed_sampler = trainer.strategy, trainer.use_distributed_sampler
        one.checkpoint_io = trainer.checkpoint_io
        one._layer_sync = trainer.layer_sync or (TorchSyncBatchNorm() if trainer.sync_batchnorm else None)
        return one

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer._accelerator_connector.{name} is private to Lightning, and Paceline does not have it. Use "
            "trainer.strategy, trainer.accelerator, trainer.device_ids, trainer.num_nodes or trainer.precision instead."
        )

    @property
    def accelerator(self) -> Accelerator:
        """The type of device."""
        return AcceleratorRegistry[self._accelerator_flag]()

    @property
    def precision_plugin(self) -> Precision:
        """The strategy's Precision."""
        return self.strategy.precision

    def _check_and_init_precision(self) -> Precision:
        return self.precision_plugin

    @property
    def cluster_environment(self) -> ClusterEnvironment:
        """The ClusterEnvironment, which tells each process its rank."""
        return getattr(self.strategy, "cluster_environment", None) or LocalEnvironment()

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices of this machine's processes."""
        return list(getattr(self.strategy, "devices", [])) or [self.strategy.device]

    _parallel_devices = parallel_devices

    @property
    def is_distributed(self) -> bool:
        """Whether the strategy uses a process group, even with a single process."""
        return hasattr(self.strategy, "process_group_backend")

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self.strategy.num_nodes

    @property
    def _accelerator_flag(self) -> str:
        return self.strategy.device.type

    @property
    def _devices_flag(self) -> int | list[int]:
        return len(self.parallel_devices) if self._accelerator_flag == "cpu" else self.strategy.device_ids

    @property
    def _num_nodes_flag(self) -> int:
        return self.strategy.num_nodes

    @property
    def _precision_flag(self) -> str:
        return self.strategy.precision.name

    @property
    def _strategy_flag(self) -> Any:
        return self.strategy


def _val_check_batch(trainer: Trainer) -> int | float | None:
    """Return the number of training batches between validations; None before a fit."""
    source = trainer.current_run.source
    if source.train_loader is None:
        return None
    batches = source.val_check_batch()
    return source.num_training_batches if batches == float("inf") else batches


#: Attributes to add to Trainers, and the views that they return.
VIEWS: dict[str, Callable[[Trainer], Any]] = {
    "fit_loop": FitLoopView,
    "validate_loop": ValidationLoop,
    "test_loop": TestLoop,
    "predict_loop": PredictLoop,
    "_accelerator_connector": AcceleratorConnector.of,
    "_evaluation_loop": _evaluation_loop,
    "_callback_connector": CallbackConnector,
    "_checkpoint_connector": CheckpointConnector,
    "_data_connector": DataConnector,
    "_logger_connector": LoggerConnector,
    "_results": results,
    "val_check_batch": _val_check_batch,
}


#: Attributes of Lightning's Trainer that cannot be read here, and what to use instead.
_ABSENT = {
    "_signal_connector": "Paceline handles signals itself. Use a Callback's on_exception",
}


def install() -> None:
    """Add the attributes in ``VIEWS`` to Trainers, and make reading those in ``_ABSENT`` an error."""
    for name, view in VIEWS.items():
        setattr(Trainer, name, property(view))
    for name, instead in _ABSENT.items():
        setattr(Trainer, name, property(functools.partial(_refuse, name, instead)))


def _refuse(name: str, instead: str, trainer: Trainer) -> NoReturn:
    raise AttributeError(f"trainer.{name} is private to Lightning, and Paceline does not have it. {instead} instead.")
