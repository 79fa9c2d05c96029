"""Trackers for ``accelerator.log``. The built-in trackers use Paceline's loggers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, ClassVar, TypeVar, cast

from .. import messages
from ..checkpoint.logger_positions import named, say_where
from ..loggers.base import Logger, Nothing
from ..loggers.csv import CSVLogger
from ..loggers.tensorboard import TensorBoardLogger
from ..loggers.values import present
from ..loggers.wandb import WandbLogger

F = TypeVar("F", bound=Callable[..., Any])

#: Trackers of Accelerate that Paceline does not have.
_ELSEWHERE = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio")
_CLASS_OF_LOGGER = {"CSVLogger": "csv", "TensorBoardLogger": "tensorboard", "WandbLogger": "wandb"}


def on_main_process(function: F) -> F:
    """Make a tracker's method run only on the main process, unless the tracker has ``main_process_only = False``."""

    @functools.wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if messages.is_rank_zero() or not getattr(self, "main_process_only", True):
            return function(self, *args, **kwargs)
        return None

    return cast("F", run)


class GeneralTracker:
    """Base class for your own tracker. Pass the class or an instance as ``log_with``.

    A class is called with the project's name, the logging directory if it ``requires_logging_directory``, and its
    ``init_kwargs``. Its constructor must not communicate with other processes, which may not have joined yet.

    Attributes:
        name: the tracker's name in ``get_tracker``, ``init_kwargs`` and ``log_kwargs``.
        requires_logging_directory: whether the tracker writes files, so that ``project_dir`` is required.
        main_process_only: whether the tracker is created and called only on the main process.
        tracker: the object that the tracker wraps, such as wandb's run; usually a property.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True

    def __init__(self, _blank: bool = False) -> None:
        missing = [name for name in ("name", "requires_logging_directory", "tracker") if name not in dir(self)]
        if missing and not _blank:
            raise NotImplementedError(
                f"{type(self).__name__} is a tracker that does not define {messages.names(missing, last='and')}. "
                "Define name = '...' and requires_logging_directory = True or False in the class, and a tracker "
                "property that returns the wrapped object (or self)."
            )

    def start(self) -> None:
        """Open files and connections. ``init_trackers`` calls this once the processes have joined."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the run's settings by name."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record the values of one step: numbers, strings, or other values that the tracker supports.

        Args:
            values: values by name.
            step: position on the x-axis.
            **kwargs: this tracker's entry in ``log_kwargs``.
        """

    def finish(self) -> None:
        """Write everything that is still buffered. ``end_training`` calls this."""

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record several images under each name."""
        self._has_no("log_images")

    def log_table(self, table_name: str, *args: Any, step: int | None = None, **kwargs: Any) -> None:
        """Record a table, given as columns and rows or as a data frame."""
        self._has_no("log_table")

    def log_figure(self, name: str, figure: Any, step: int | None = None, **kwargs: Any) -> None:
        """Record a matplotlib figure."""
        self._has_no("log_figure")

    def log_artifact(self, path: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save a file or folder with the run."""
        self._has_no("log_artifact")

    def _has_no(self, method: str) -> None:
        raise NotImplementedError(
            f"The tracker {self.name!r} ({type(self).__name__}) has no {method}. Define {method} in the class, or use "
            f"the wrapped object: accelerator.get_tracker({self.name!r}, unwrap=True)."
        )


def _by_logger(method: str) -> Any:
    """Create a tracker method that calls the logger's method of the same name."""

    def record(self: LoggerTracker, *args: Any, **kwargs: Any) -> None:
        self._call(method, method, *args, **kwargs)

    record.__name__, record.__doc__ = method, getattr(GeneralTracker, method).__doc__
    return on_main_process(record)


class LoggerTracker(GeneralTracker):
    """Wraps one of Paceline's loggers as a tracker.

    Nothing is opened before the first value is logged, so that ``load_state`` can still continue the checkpoint's run.
    """

    name = "logger"
    requires_logging_directory = False
    #: The package that this tracker needs.
    package: ClassVar[str | None] = None

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._config: dict[str, Any] = {}
        self._settled = True
        #: Whether this process has recorded something, so it cannot continue another run.
        self.is_used = False
        if type(self) is LoggerTracker:
            kind = type(logger).__name__
            self.name = _CLASS_OF_LOGGER.get(kind, kind)
        super().__init__()

    @property
    def logger(self) -> Logger:
        """The logger; the run's settings are recorded on first access."""
        if not self._settled:
            self._settled = True
            self._logger.log_hyperparams(self._config)
        return self._logger

    @property
    def tracker(self) -> Any:
        """The object that the logger wraps: ``SummaryWriter``, wandb's run, ..."""
        self.is_used = True
        return self.logger.experiment

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._config |= values
        self._settled = not self._config

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.is_used = True
        self.logger.log_record(present(values), step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.logger.close()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        for name, images in present(values).items():
            self._call("log_images", "log_image", name, images, step=step, **kwargs)

    log_table = _by_logger("log_table")
    log_figure = _by_logger("log_figure")
    log_artifact = _by_logger("log_artifact")

    def _call(self, method: str, of_logger: str, *args: Any, **kwargs: Any) -> None:
        record = getattr(self._logger, of_logger, None)
        if record is None:
            self._has_no(method)
        else:
            self.is_used, _ = True, self.logger
            record(*args, **kwargs)

    def resume(self, state: Mapping[str, Any]) -> bool:
        """Continue the run whose state came from :meth:`Logger.state_dict`; return True if that was possible."""
        if self.is_used:
            return False
        self._logger.withdraw()
        if not self._logger.recognizes(state):
            return False
        self._logger.take_over(state)
        self._logger.load_state_dict(state)
        self._settled = not self._config
        return True


class CSVTracker(LoggerTracker):
    """``"csv"``: a :class:`~paceline.loggers.CSVLogger` that writes to ``logging_dir/<project name>/version_N``."""

    name = "csv"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(CSVLogger(logging_dir, **{"name": run_name, **kwargs}))


class TensorBoardTracker(LoggerTracker):
    """``"tensorboard"``: :class:`~paceline.loggers.TensorBoardLogger`, in ``logging_dir/<project name>/version_N``."""

    name = "tensorboard"
    requires_logging_directory = True
    package = "tensorboard"

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(TensorBoardLogger(logging_dir, **{"name": run_name, "default_hp_metric": False, **kwargs}))

    @property
    def writer(self) -> Any:
        """The ``SummaryWriter``."""
        return self.tracker


class WandBTracker(LoggerTracker):
    """``"wandb"``: a :class:`~paceline.loggers.WandbLogger` whose wandb project is named after the project.

    The run (also available as ``wandb.run``) exists after ``init_trackers``.
    """

    name = "wandb"
    package = "wandb"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(WandbLogger(**{"project": run_name, **kwargs}))

    @property
    def run(self) -> Any:
        """The wandb run."""
        return self.tracker

    @on_main_process
    def start(self) -> None:
        _ = self._logger.experiment

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        super().store_init_configuration(values)
        _ = self.logger

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        super().log_images({name: list(images) for name, images in present(values).items()}, step, **kwargs)

    def resume(self, state: Mapping[str, Any]) -> bool:
        resumed = super().resume(state)
        if not self.is_used:
            self.start()
            _ = self.logger
        return resumed


class _Absent(GeneralTracker):
    """Placeholder that does nothing, for processes that do not have the tracker."""

    requires_logging_directory = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.tracker = Nothing()
        super().__init__()

    def __getattr__(self, name: str) -> Any:
        return getattr(Nothing(), name)

    def _has_no(self, method: str) -> None:
        return None


#: Values that ``log_with`` accepts in addition to names.
Tracker = Logger | GeneralTracker | type[GeneralTracker]
_classes: dict[str, type[GeneralTracker]] = {
    "csv": CSVTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandBTracker,
}


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Register a tracker class for ``log_with`` by its ``name``; warn if it replaces a class of the same name.

    Raises:
        ValueError: the class does not inherit from :class:`GeneralTracker`, or lacks ``name`` or
            ``requires_logging_directory``.
    """
    if not _is_tracker_class(tracker_class):
        raise ValueError(
            f"register_tracker_class got {tracker_class!r}, which is not a subclass of GeneralTracker. Pass the class "
            "itself, not an instance."
        )
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not name or not hasattr(tracker_class, "requires_logging_directory"):
        raise ValueError(
            f"register_tracker_class({tracker_class.__name__}): the class needs name = '...' and "
            "requires_logging_directory = True or False, which are read before an object is created."
        )
    if _classes.get(name, tracker_class) is not tracker_class:
        messages.warn(
            f"The tracker {name!r} was {_classes[name].__name__} and is now {tracker_class.__name__}. To keep both, "
            "give the new class a different name."
        )
    _classes[name] = tracker_class


def get_available_trackers() -> list[str]:
    """Return the names of all trackers whose packages are installed."""
    return [name for name, kind in _classes.items() if _lacks(kind) is None]


def filter_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[Any]:
    """Return the names, classes and objects of the requested trackers without duplicates.

    Args:
        log_with: a name or several names separated by commas, a ``LoggerType``, a :class:`GeneralTracker` object or
            class, a Paceline logger, or a list of these. ``"all"`` means every tracker that works here.
        logging_dir: directory for trackers that write files.

    Raises:
        ValueError: a name is unknown, or a tracker that writes files has no ``logging_dir``.
        TypeError: a value is not a tracker.
        ModuleNotFoundError: a tracker's package is not installed.
    """
    if isinstance(log_with, str) and not isinstance(log_with, Enum):
        log_with = [name.strip() for name in log_with.split(",")]
    asked = log_with if isinstance(log_with, list | tuple) else [] if log_with is None else [log_with]
    wanted: list[Any] = []
    for one in asked:
        if isinstance(one, Enum):
            one = one.value
        several = _that_work(logging_dir) if one == "all" else [_checked(one, logging_dir)]
        wanted += [item for item in several if item not in wanted]
    return wanted


def _that_work(logging_dir: Any) -> list[str]:
    available = get_available_trackers()
    homeless = [name for name in available if _classes[name].requires_logging_directory and logging_dir is None]
    if homeless:
        messages.info_once(
            f"log_with='all' leaves out {messages.names(homeless, last='and')}, because there is no directory to write "
            "to. To include them, set Accelerator(project_dir='...')."
        )
    return [name for name in available if name not in homeless]


def _checked(one: Any, logging_dir: Any) -> Any:
    if isinstance(one, Logger | GeneralTracker):
        return one
    if not isinstance(one, str) and not _is_tracker_class(one):
        raise TypeError(
            f"log_with got {one!r} (of type {type(one).__name__}), which is not a tracker. Pass a name such as "
            "'wandb', a GeneralTracker object or class, or one of Paceline's loggers."
        )
    if isinstance(one, str) and one in _ELSEWHERE and one not in _classes:
        raise NotImplementedError(
            f"log_with={one!r}: Paceline does not have this tracker. Write it as a subclass of GeneralTracker with "
            f"name = {one!r} and pass it as log_with, or choose {messages.names(['all', *_classes])}."
        )
    if isinstance(one, str) and one not in _classes:
        raise ValueError(messages.unknown("tracker", one, ["all", *_classes], ", or pass a GeneralTracker"))
    kind = _classes[one] if isinstance(one, str) else one
    missing = _lacks(kind)
    if missing is not None:
        raise ModuleNotFoundError(messages.missing(f"log_with={one!r}", missing), name=missing)
    if getattr(kind, "requires_logging_directory", False) and logging_dir is None:
        raise ValueError(
            f"log_with={one if isinstance(one, str) else kind.__name__!r} writes files, but has no directory to write "
            "to. Set Accelerator(project_dir='...'), or logging_dir in its ProjectConfiguration."
        )
    return one


def _lacks(kind: type[GeneralTracker]) -> str | None:
    package = getattr(kind, "package", None)
    return package if package is not None and not messages.is_installed(package) else None


def _is_tracker_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, GeneralTracker)


class Trackers(list[GeneralTracker]):
    """An Accelerator's trackers; empty until ``init_trackers``.

    No method communicates with other processes, so each may be called on the main process alone. Other processes have
    the same list, but only trackers with ``main_process_only = False`` do anything there.

    Args:
        logging_dir: the directory from the Accelerator's ``ProjectConfiguration``.

    Attributes:
        wanted: the requested trackers.
    """

    def __init__(self, log_with: Any = None, logging_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self.wanted = filter_trackers(log_with, logging_dir)
        self._logging_dir = logging_dir
        self._started = False
        self._ended = False
        self._resumed: dict[str, Any] = {}

    def start(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """Create and start all trackers, and log the run's settings. Trackers of an earlier run are closed.

        Args:
            project_name: name of the folder in the logging directory, or of the wandb project.
            config: the run's settings.
            init_kwargs: additional arguments, keyed by tracker name.
            logging_dir: directory to use instead of the Accelerator's original one.
        """
        if self._started:
            self.finish()
        options, folder = dict(init_kwargs or {}), logging_dir or self._logging_dir
        self._check_names("init_kwargs", options)
        self[:] = [_made(one, project_name, folder, options) for one in self.wanted]
        self._started, self._ended = True, False
        for tracker in self:
            tracker.start()
        for tracker in self if config else ():
            tracker.store_init_configuration(dict(config or {}))
        if self._resumed:
            self.load_state_dict(self._resumed)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log the values of one step to every tracker.

        Args:
            values: numbers, single-element tensors, and other values that the trackers support. Paceline's trackers
                skip None.
            step: position on the x-axis.
            log_kwargs: additional arguments for :meth:`GeneralTracker.log`, keyed by tracker name.

        Raises:
            RuntimeError: ``init_trackers`` was not called.
        """
        if not self._started and messages.is_rank_zero():
            raise RuntimeError(self._why_not(f"accelerator.log({list(values)})"))
        if log_kwargs:
            self._check_names("log_kwargs", log_kwargs)
        for tracker in self:
            tracker.log(dict(values), step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def get(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker with the given name, or the object that it wraps if ``unwrap`` is True.

        On processes without this tracker, the returned object accepts every call and does nothing.

        Raises:
            ValueError: no tracker has this name.
            RuntimeError: ``init_trackers`` was not called.
        """
        found = next((tracker for tracker in self if tracker.name == name), None)
        if found is None and not messages.is_rank_zero():
            found = _Absent(name)
        if found is None:
            if not self._started:
                raise RuntimeError(self._why_not(f"accelerator.get_tracker({name!r})"))
            there = [tracker.name for tracker in self]
            if not there:
                raise ValueError(f"get_tracker({name!r}): no tracker is set up. Set Accelerator(log_with={name!r}).")
            raise ValueError(messages.unknown("tracker", name, there))
        return found.tracker if unwrap else found  # type: ignore[attr-defined]

    def finish(self) -> None:
        """Close every tracker; call ``init_trackers`` to start another run."""
        if self._started:
            self._started, self._ended = False, True
            for tracker in self:
                tracker.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the loggers' positions, for a checkpoint; empty except on the main process."""
        found = self._loggers() if self._started else {}
        return {name: state for name, one in found.items() if (state := one.logger.state_dict())}

    def load_state_dict(self, states: Mapping[str, Any], newer: object = None) -> None:
        """Continue the checkpoint's runs; drop values recorded after the checkpoint, as they will be recorded again.

        If ``init_trackers`` has not been called yet, the states are kept until it is. A tracker that has already
        recorded something in this process is not changed.

        Args:
            states: result of :meth:`state_dict`.
            newer: a later checkpoint of that run, or None. If there is one, logging continues as a new run.
        """
        if not messages.is_rank_zero():
            return
        if newer is not None:
            messages.info(
                f"The loaded state is not the latest of its run ({newer} is newer), so logging continues as a new run "
                "and the original run's logs stay intact."
            )
            return
        if not self._started:
            self._resumed = dict(states)
            return
        self._resumed = {}
        going = {name: one for name, one in self._loggers().items() if name in states and one.resume(states[name])}
        say_where("Logging continues in", (one.logger for one in going.values()))

    def _loggers(self) -> dict[str, LoggerTracker]:
        mine = {id(one._logger): one for one in self if isinstance(one, LoggerTracker)}
        return {name: mine[id(logger)] for name, logger in named(one._logger for one in mine.values())}

    def _check_names(self, what: str, options: Iterable[str]) -> None:
        names = [*_classes, *_ELSEWHERE, *(_name(one) for one in self.wanted)]
        for name in options:
            if name not in names:
                raise ValueError(messages.unknown(f"tracker in {what}", name, dict.fromkeys(names)))

    def _why_not(self, call: str) -> str:
        if self._ended:
            return (
                f"{call} came after end_training, which closed all trackers. Call init_trackers to start another run."
            )
        if not self.wanted:
            return (
                f"{call} has no effect, because this Accelerator has no tracker. Choose a tracker, such as with "
                "Accelerator(log_with='tensorboard', project_dir='...'), and call "
                "accelerator.init_trackers('my_project')."
            )
        return f"{call} before init_trackers has no effect. Call accelerator.init_trackers('my_project') first."


def _name(one: Any) -> str:
    """Return the name of a requested tracker that has not been created yet."""
    if isinstance(one, str):
        return one
    if isinstance(one, Logger):
        return LoggerTracker(one).name
    name = getattr(one, "name", None)
    return name if isinstance(name, str) else one.__name__


def _made(one: Any, project_name: str, logging_dir: Any, init_kwargs: Mapping[str, Mapping[str, Any]]) -> Any:
    """Create a tracker from a name, class or object, or a placeholder if this process needs no tracker."""
    kind: Any = _classes[one] if isinstance(one, str) else one
    if getattr(kind, "main_process_only", True) and not messages.is_rank_zero():
        return _Absent(_name(one))
    if isinstance(kind, Logger):
        return LoggerTracker(kind)
    if isinstance(kind, GeneralTracker):
        return kind
    folder = [logging_dir] if kind.requires_logging_directory else []
    return kind(project_name, *folder, **init_kwargs.get(_name(one), {}))
