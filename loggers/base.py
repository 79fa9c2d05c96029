"""The interface of all loggers, and a logger that discards everything."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from .. import messages


class Logger(ABC):
    """Base class for loggers, which send a run's values to a file or a service.

    Except where noted, the Trainer calls a logger's methods only on rank 0, in the training thread. A slow logger
    should write in its own thread or process.
    """

    group_separator: str = "/"

    @property
    @abstractmethod
    def name(self) -> str | None:
        """The experiment's name, usually also the name of its folder."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """The version, which identifies this run of the experiment."""

    @property
    def root_dir(self) -> str | None:
        """The folder that contains all versions of the experiment, or None if nothing is written locally."""
        return None

    @property
    def log_dir(self) -> str | None:
        """This run's folder, or None if nothing is written locally. By default, checkpoints are saved inside it."""
        return None

    @property
    def save_dir(self) -> str | None:
        """The folder that the user passed, which contains ``name`` and ``version``."""
        return None

    @property
    def records_dir(self) -> str | None:
        """The folder whose path a fit prints when it starts; if None, no path is printed."""
        return self.log_dir

    @property
    def experiment(self) -> Any:
        """The underlying object (such as a ``SummaryWriter`` or a wandb run), which is created on first use."""
        return None

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log values for one step.

        Args:
            metrics: numbers by name. The Trainer always includes ``"epoch"``.
            step: position on the x axis, which is the number of optimizer updates so far.
        """

    def log_record(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log values of any type for one step, if this logger can show them.

        The valid ``options`` depend on the logger.
        """
        if options:
            raise TypeError(
                f"{type(self).__name__}.log_record accepts no options, but got {', '.join(options)}. Remove these "
                "options."
            )
        self.log_metrics(metrics=values, step=step)

    @abstractmethod
    def log_hyperparams(
        self, params: Mapping[str, Any] | None = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Log the run's hyperparameters, which may be nested and may contain any values that can be shown as text."""

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Log the model's graph, if the logger can show graphs."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Called with the ``ModelCheckpoint`` callback each time the callback has written a file."""

    def save(self) -> None:
        """Flush all logged values. Called before a checkpoint is written."""

    def run_dirs(self) -> list[str]:
        """Return the known folders of this experiment's runs, without creating any folders."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return the run's position in this logger's output, as plain data for a checkpoint.

        An empty dict means that a resumed run cannot continue the log. By the time this method returns, all logged
        values must be stored. Called on rank 0.
        """
        return {}

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        """Return True if ``state`` belongs to a run that this logger can continue. Called on rank 0."""
        return True

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Continue a run that :meth:`recognizes` accepted. Called on every rank, before the folder is first used."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the saved position and drop any later values, which the run will log again. Called on rank 0."""

    def withdraw(self) -> None:
        """Discard a run without logged values, so that an earlier run can be continued."""

    def finalize(self, status: str) -> None:
        """Store all values at the end of a run; ``status`` is ``"success"``, ``"failed"`` or ``"interrupted"``."""

    def close(self) -> None:
        """Close the run permanently, even if :meth:`finalize` leaves it open."""
        self.finalize("success")


class DummyLogger(Logger):
    """A logger that discards everything. It replaces the Trainer's loggers if ``fast_dev_run`` is set.

    It accepts any method call, so that code such as ``self.logger.log_image(...)`` still runs.
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

    def __getitem__(self, index: int) -> DummyLogger:
        """Return this logger, for programs that index ``self.logger``."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return _discard


def rank_zero_experiment(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorator for a logger's ``experiment``; all ranks except 0 get an object that ignores all calls."""

    @wraps(fn)
    def experiment(self: Any) -> Any:
        return fn(self) if messages.is_rank_zero() else Nothing()

    return experiment


def _discard(*args: Any, **kwargs: Any) -> None:
    return None


class Nothing:
    """An object whose attributes and calls return the object itself, so that code using ``logger.experiment`` runs."""

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
