"""Base class of loggers that pass a run's values to another package, which stores or sends them."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from .. import messages
from .base import rank_zero_experiment
from .checkpoint_uploads import CheckpointUploads, LogModel
from .values import mapping, numbers, plain, record


class ServiceLogger(CheckpointUploads):
    """Base class of loggers that log a run through another package.

    The run is opened on first use. A resumed fit continues the run that wrote the checkpoint, unless you pass another
    run's id. If the run already has values from after the checkpoint, they are not logged again: for each metric, the
    logger compares the number of values that it has logged with the number that the package has.

    A subclass sets ``package`` and defines :meth:`_open`, :meth:`_write`, :meth:`_write_hyperparams`, :meth:`_finish`
    and :meth:`_upload`. To support resuming, it also defines :meth:`_exists` and :meth:`_recorded`.

    Args:
        project: name of the project (or experiment) into which the package groups runs.
        run_id: the id of a run to continue; None starts a new run.
        save_dir: the folder for local files and checkpoints, or None.
        prefix: prefix of each metric's name, followed by a dash.
        log_model: when to upload checkpoints: ``"all"`` (as soon as they are written), True (at the end of the run) or
            False (never).
    """

    #: The package to install and import.
    package: ClassVar[str]
    #: Whether a finished run can be reopened to log more values. If not, the run stays open after a fit.
    can_reopen: ClassVar[bool] = True

    def __init__(
        self,
        project: str,
        run_id: str | None,
        save_dir: str | os.PathLike[str] | None,
        prefix: str,
        log_model: LogModel,
    ) -> None:
        who = type(self).__name__
        if not messages.is_installed(self.package):
            raise ModuleNotFoundError(messages.missing(who, self.package), name=self.package)
        super().__init__(log_model)
        self._project = project
        self._id = run_id
        self._is_named = run_id is not None
        self._save_dir = None if save_dir is None else os.fspath(save_dir)
        self._prefix = f"{prefix}-" if prefix else ""
        self._step = -1
        self._experiment: Any = None
        #: By name, the number of values logged so far, and the number of later values that the package already has.
        self._logged: Counter[str] = Counter()
        self._known: dict[str, int] = {}

    @property
    def name(self) -> str | None:
        """The project's name."""
        return self._project

    @property
    def version(self) -> str | None:
        """The run's id, or None on ranks other than 0. Opens a run if no run is open yet."""
        if self._id is None and messages.is_rank_zero():
            _ = self.experiment
        return self._id

    @property
    def save_dir(self) -> str | None:
        return self._save_dir

    @property
    def root_dir(self) -> str | None:
        folder, name = self._save_dir, self.name
        return None if folder is None or name is None else os.path.join(folder, name)

    @property
    def log_dir(self) -> str | None:
        """The folder for checkpoints; None without ``save_dir``."""
        root, version = self.root_dir, self.version
        return None if root is None or version is None else os.path.join(root, version)

    @property
    def records_dir(self) -> None:
        """None, because the package itself reports where its files are."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The package's own object for the run."""
        if self._experiment is None:
            self._experiment = self._open()
        return self._experiment

    def run_dirs(self) -> list[str]:
        """Return the folders of the project's runs, or only this run's if the user passed its id."""
        root = self.root_dir
        if root is None or not os.path.isdir(root):
            return []
        if self._is_named and self._id is not None:
            return [os.path.join(root, self._id)]
        return sorted(entry.path for entry in os.scandir(root) if entry.is_dir())

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log the values of one step. ``step`` defaults to the last logged step plus 1."""
        self._log(numbers(metrics, self._prefix), step)

    def log_record(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log anything that the package can show; ``options`` are passed to the package's log function."""
        self._log(record(values, self._prefix), step, **options)

    def log_hyperparams(
        self, params: Mapping[str, Any] | None = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Add values to the run's hyperparameters; ``metrics`` are logged at step 0."""
        if messages.is_rank_zero():
            self._write_hyperparams(plain(mapping(params)))
        if metrics:
            self.log_metrics(metrics, step=0)

    def state_dict(self) -> dict[str, Any]:
        _ = self.experiment
        self._flush()
        return {"project": self._project, "id": self._id, "logged": dict(self._logged)}

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        """Return True if the run is in this project and still exists, and the user did not pass another id."""
        return state["project"] == self._project and self._id in (None, state["id"]) and self._exists(state["id"])

    def take_over(self, state: Mapping[str, Any]) -> None:
        self._id = state["id"]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._experiment is not None:
            self._flush()
        self._logged = Counter(state["logged"])
        there = self._recorded()
        self._known = {name: number - self._logged[name] for name, number in there.items()}

    def withdraw(self) -> None:
        """Discard the open run if it has no values, and forget its id unless the user passed it."""
        if self._logged:
            return
        if self._experiment is not None:
            self._discard()
            self._experiment = None
        if not self._is_named:
            self._id = None

    def finalize(self, status: str) -> None:
        if self._log_model and messages.is_rank_zero():
            self._upload_the_rest()
        if self._experiment is None:
            return
        self._flush()
        if status != "success" or self.can_reopen:
            self._end(status)

    def close(self) -> None:
        """Finish the run."""
        self.finalize("success")
        if self._experiment is not None:
            self._end("success")

    def _end(self, status: str) -> None:
        self._finish(status)
        self._experiment = None

    def _log(self, values: dict[str, Any], step: int | None, **options: Any) -> None:
        if not messages.is_rank_zero():
            return
        self._step = self._step + 1 if step is None else int(step)
        named = {self._allowed(name): value for name, value in values.items()}
        new = {name: value for name, value in named.items() if self._is_new(name)}
        if new:
            self._write(self.experiment, new, self._step, **options)

    def _is_new(self, name: str) -> bool:
        """Count a logged value; return True if the package does not have that value yet."""
        self._logged[name] += 1
        known = self._known.get(name, 0)
        if known > 0:
            self._known[name] = known - 1
        return known <= 0

    def _shown(self, values: Mapping[str, Any], kinds: Any = int | float) -> dict[str, Any]:
        """Return the values of the given types; warn about each value that is left out."""
        kept = {name: value for name, value in values.items() if isinstance(value, kinds)}
        for name in values.keys() - kept.keys():
            messages.warn_once(
                f"{type(self).__name__} cannot show {name!r} ({messages.a(values[name])}), so it is left out. Use "
                "logger.experiment to log it in a form that the package supports.",
                key=f"{type(self).__name__} {name}",
            )
        return kept

    def _sdk(self) -> Any:
        """Import the package."""
        return import_module(self.package)

    @abstractmethod
    def _open(self) -> Any:
        """Open the run ``self._id``, or a new run if that is None, and set ``self._id``."""

    @abstractmethod
    def _write(self, run: Any, values: dict[str, Any], step: int, **options: Any) -> None:
        """Write the values of one step."""

    @abstractmethod
    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        """Write plain, nested hyperparameters."""

    @abstractmethod
    def _finish(self, status: str) -> None:
        """Finish the open run; ``status`` is the status that was passed to :meth:`finalize`."""

    def _allowed(self, name: str) -> str:
        """Return the name under which the package stores a value."""
        return name

    def _discard(self) -> None:
        """Remove an open run without logged values, or finish it if it cannot be removed."""
        self._finish("success")

    def _flush(self) -> None:
        """Wait until all logged values are stored."""

    def _exists(self, run_id: str) -> bool:
        """Return True if the run with this id can be continued."""
        return True

    def _recorded(self) -> Mapping[str, int]:
        """Return how many values of each metric the run ``self._id`` already has; empty if this is unknown."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_experiment": None}
