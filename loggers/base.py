"""Interface of loggers, and a logger that discards everything."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from .. import messages


class Logger(ABC):
    """Base class of loggers, which send a run's values to a file or a service.

    The trainer calls every method on rank 0 only, from the training thread. A slow logger should write in its own
    thread or process.
    """

    group_separator: str = "/"

    @property
    @abstractmethod
    def name(self) -> str | None:
        """The experiment's name, usually a folder."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """The version: which run of the experiment this is."""

    @property
    def root_dir(self) -> str | None:
        """The folder that holds all versions of the experiment, or None if nothing is written locally."""
        return None

    @property
    def log_dir(self) -> str | None:
        """The folder of this run, or None if nothing is written locally. Checkpoints go below it by default."""
        return None

    @property
    def save_dir(self) -> str | None:
        """The folder that the user gave, which contains ``name`` and ``version``."""
        return None

    @property
    def records_dir(self) -> str | None:
        """The folder that a fit reports when it starts; None reports nothing."""
        return self.log_dir

    @property
    def experiment(self) -> Any:
        """The underlying object (``SummaryWriter``, wandb's run), created when it is first used."""
        return None

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log the values of one step.

        Args:
            metrics: numbers by name. The trainer always includes ``"epoch"``.
            step: position on the x axis: the number of optimizer updates so far.
        """

    def log_record(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log values of one step, which need not be numbers, if this logger can show them.

        ``options`` depend on the logger.
        """
        if options:
            raise TypeError(
                f"{type(self).__name__} takes no options for a record, but got {', '.join(options)}. Remove them."
            )
        self.log_metrics(metrics=values, step=step)

    @abstractmethod
    def log_hyperparams(
        self, params: Mapping[str, Any] | None = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Log the run's hyperparameters, which may be nested, with any values that have a text form."""

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Log the model's graph, if the logger can show one."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Called with the ``ModelCheckpoint`` after it has written a file."""

    def save(self) -> None:
        """Flush all logged values. Called before a checkpoint is written."""

    def run_dirs(self) -> list[str]:
        """Return the known folders of this experiment's runs, without creating any."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return the run's position in this logger's output, as plain data for a checkpoint.

        An empty dict means that a resumed run cannot continue the log. Called on rank 0. All logged values must be
        stored when this returns.
        """
        return {}

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        """Whether ``state`` belongs to a run that this logger can continue. Called on rank 0."""
        return True

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Continue a recognized run. Called on every rank, before the folder is first used."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the saved position and drop later values, which are logged again. Called on rank 0."""

    def withdraw(self) -> None:
        """Give up a run without logged values, so that an earlier run can be continued."""

    def finalize(self, status: str) -> None:
        """Store all values at the end of a run; ``status`` is ``"success"``, ``"failed"`` or ``"interrupted"``."""

    def close(self) -> None:
        """Close the run for good, also if :meth:`finalize` leaves it open."""
        self.finalize("success")


class DummyLogger(Logger):
    """Logger that discards everything; replaces the loggers with ``fast_dev_run``.

    It has every method of every logger, so that ``self.logger.log_image(...)`` still runs.
    """

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def experiment(self) -> Nothing:
        return Nothing()

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        return None

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return _discard


def rank_zero_experiment(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorate ``experiment`` of a logger of your own: ranks other than 0 get an object that takes every call."""

    @wraps(fn)
    def experiment(self: Any) -> Any:
        return fn(self) if messages.is_rank_zero() else Nothing()

    return experiment


def _discard(*args: Any, **kwargs: Any) -> None:
    return None


class Nothing:
    """Object whose attributes and calls return itself, so that code that uses ``logger.experiment`` still runs."""

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Nothing:
        return self

    def __getitem__(self, key: Any) -> Nothing:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass
