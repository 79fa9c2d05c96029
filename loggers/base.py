"""The interface of a logger, and the one that swallows everything."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class Logger(ABC):
    """Takes the numbers of a run to a file or a service. Subclass it to add a place of your own.

    The trainer calls every method on rank 0 only, from the thread that trains: a logger that writes slowly hands the
    work to a thread or process of its own.
    """

    group_separator: str = "/"

    @property
    @abstractmethod
    def name(self) -> str | None:
        """The experiment's name, usually a folder."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """Which run of the experiment this is."""

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
        """The folder the user gave, above ``name`` and ``version``."""
        return None

    @property
    def records_dir(self) -> str | None:
        """The folder of the records, which a fit names when it starts; None if there is none to name."""
        return self.log_dir

    @property
    def experiment(self) -> Any:
        """The object behind the logger (``SummaryWriter``, wandb's run), made when first asked for."""
        return None

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record the values of one step.

        Args:
            metrics: numbers by name; ``"epoch"`` is always among those the trainer sends.
            step: place on the x axis, the number of optimizer updates made so far.
        """

    def log_record(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Record values of one step that need not be numbers, as far as this logger can show them.

        Args:
            values: numbers, texts, or what else the logger has a form for, by name.
            step: place on the x axis.
            **options: of the logger's own.
        """
        if options:
            raise TypeError(
                f"{type(self).__name__} takes no options for a record, but got {', '.join(options)}. Leave them out."
            )
        self.log_metrics(values, step)

    @abstractmethod
    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Record the settings of the run. ``params`` may be nested and hold any value that has a text form."""

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Record the model's graph, where the logger can show one."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Called with the ``ModelCheckpoint`` after it has written a file."""

    def save(self) -> None:
        """Bring everything recorded so far to its place (called before a checkpoint is written)."""

    def run_dirs(self) -> list[str]:
        """The folders that runs of this experiment may have, as far as they are known; asking makes none."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands in what this logger writes, as plain data for a checkpoint. Empty: no resume goes on.

        Called on rank 0. Everything recorded so far has to be in its place when this returns.
        """
        return {}

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        """Whether a checkpoint's :meth:`state_dict` is of a run that this logger can go on with (asked on rank 0)."""
        return True

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Become the logger of a run that was recognized, before anybody asks for its folder. Called on every rank."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the run stood: what was recorded after it is recorded again, so it is dropped. On rank 0."""

    def withdraw(self) -> None:
        """Let go of a run in which nothing was recorded yet, so that an earlier one can be taken over."""

    def finalize(self, status: str) -> None:
        """End of the run. ``status`` is ``"success"``, ``"failed"`` or ``"interrupted"``. Nothing may be lost here."""

    def close(self) -> None:
        """Nothing more will be recorded, by nobody: end a run that :meth:`finalize` leaves open."""
        self.finalize("success")


class DummyLogger(Logger):
    """Takes everything, keeps nothing; stands in for the loggers under ``fast_dev_run``."""

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def experiment(self) -> Nothing:
        return Nothing()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        return None

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        return None


class Nothing:
    """Answers every attribute and call with itself, so that code that uses ``logger.experiment`` still runs."""

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Nothing:
        return self

    def __getitem__(self, key: Any) -> Nothing:
        return self
