"""Trackers: where ``accelerator.log`` sends the numbers of a run. The built-in ones are Paceline's own loggers."""

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

#: Trackers that other tools have under a name of their own.
_ELSEWHERE = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio")
_CLASS_OF_LOGGER = {"CSVLogger": "csv", "TensorBoardLogger": "tensorboard", "WandbLogger": "wandb"}


def on_main_process(function: F) -> F:
    """Let a tracker's method run on the main process only, unless the tracker has ``main_process_only = False``."""

    @functools.wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if messages.is_rank_zero() or not getattr(self, "main_process_only", True):
            return function(self, *args, **kwargs)
        return None

    return cast("F", run)


class GeneralTracker:
    """A place of your own for the numbers of a run. Subclass it, and pass an object or the class as ``log_with``.

    A class is called with the project's name, the logging directory if it ``requires_logging_directory``, and its
    ``init_kwargs``. Making one must not talk to other processes: they may not have met yet.

    Attributes:
        name: what ``get_tracker``, ``init_kwargs`` and ``log_kwargs`` call it.
        requires_logging_directory: it writes files, so ``project_dir`` must be given.
        main_process_only: it is made and called on the main process alone.
        tracker: the object behind it, such as wandb's run; a property, usually.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True

    def __init__(self, _blank: bool = False) -> None:
        missing = [name for name in ("name", "requires_logging_directory", "tracker") if name not in dir(self)]
        if missing and not _blank:
            raise NotImplementedError(
                f"{type(self).__name__} is a tracker without {messages.names(missing, last='and')}. Define "
                "name = '...' and requires_logging_directory = True or False in the class, and a property tracker "
                "that returns the object behind it (self will do)."
            )

    def start(self) -> None:
        """Called by ``init_trackers``, when the processes have met: the moment to open files and connections."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings of the run, by name."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record the values of one step: numbers, texts, or what else the tracker has a form for.

        Args:
            values: by name.
            step: place on the x axis.
            **kwargs: what ``log_kwargs`` has for this tracker.
        """

    def finish(self) -> None:
        """Called by ``end_training``: nothing may be lost after it."""

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images, several under each name."""
        self._has_no("log_images")

    def log_table(self, table_name: str, *args: Any, step: int | None = None, **kwargs: Any) -> None:
        """Record a table, of columns and rows or of a data frame."""
        self._has_no("log_table")

    def log_figure(self, name: str, figure: Any, step: int | None = None, **kwargs: Any) -> None:
        """Record a matplotlib figure."""
        self._has_no("log_figure")

    def log_artifact(self, path: str | os.PathLike[str], **kwargs: Any) -> None:
        """Keep a file or folder with the run."""
        self._has_no("log_artifact")

    def _has_no(self, method: str) -> None:
        raise NotImplementedError(
            f"The tracker {self.name!r} ({type(self).__name__}) has no {method}. Define it in the class, or use the "
            f"object behind it: accelerator.get_tracker({self.name!r}, unwrap=True)."
        )


class LoggerTracker(GeneralTracker):
    """One of Paceline's loggers as a tracker.

    Nothing is opened before something is recorded, so that ``load_state`` can still make it go on with the run that
    wrote the checkpoint.

    Args:
        logger: that writes.
    """

    name = "logger"
    requires_logging_directory = False
    #: The package that it needs, by the name to install it with.
    package: ClassVar[str | None] = None

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._config: dict[str, Any] = {}
        self._settled = True
        #: Whether something was recorded in this process, so that there is no way back to another run.
        self.is_used = False
        if type(self) is LoggerTracker:
            kind = type(logger).__name__
            self.name = _CLASS_OF_LOGGER.get(kind, kind)
        super().__init__()

    @property
    def logger(self) -> Logger:
        """The logger, which knows the settings of the run."""
        if not self._settled:
            self._settled = True
            self._logger.log_hyperparams(self._config)
        return self._logger

    @property
    def tracker(self) -> Any:
        """The object behind the logger: ``SummaryWriter``, wandb's run, ..."""
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

    @on_main_process
    def log_table(self, table_name: str, *args: Any, step: int | None = None, **kwargs: Any) -> None:
        self._call("log_table", "log_table", table_name, *args, step=step, **kwargs)

    @on_main_process
    def log_figure(self, name: str, figure: Any, step: int | None = None, **kwargs: Any) -> None:
        self._call("log_figure", "log_figure", name, figure, step=step, **kwargs)

    @on_main_process
    def log_artifact(self, path: str | os.PathLike[str], **kwargs: Any) -> None:
        self._call("log_artifact", "log_artifact", path, **kwargs)

    def _call(self, method: str, of_logger: str, *args: Any, **kwargs: Any) -> None:
        record = getattr(self._logger, of_logger, None)
        if record is None:
            self._has_no(method)
        else:
            self.is_used, _ = True, self.logger
            record(*args, **kwargs)

    def go_on(self, state: Mapping[str, Any]) -> bool:
        """Go on with the run of a checkpoint, as :meth:`Logger.state_dict` tells of it; whether that was possible."""
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
    """``"csv"``: :class:`~paceline.loggers.CSVLogger` in ``logging_dir/<project name>/version_N``."""

    name = "csv"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(CSVLogger(logging_dir, **{"name": run_name, **kwargs}))


class TensorBoardTracker(LoggerTracker):
    """``"tensorboard"``: :class:`~paceline.loggers.TensorBoardLogger` in ``logging_dir/<project name>/version_N``."""

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
    """``"wandb"``: :class:`~paceline.loggers.WandbLogger`; the project's name is wandb's project.

    The run is there from ``init_trackers`` on, as ``wandb.run`` too.
    """

    name = "wandb"
    package = "wandb"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(WandbLogger(**{"project": run_name, **kwargs}))

    @property
    def run(self) -> Any:
        """The run."""
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

    def go_on(self, state: Mapping[str, Any]) -> bool:
        went_on = super().go_on(state)
        if not self.is_used:
            self.start()
            _ = self.logger
        return went_on


class _Absent(GeneralTracker):
    """Stands for a tracker on processes that have none: takes everything, keeps nothing."""

    requires_logging_directory = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.tracker = Nothing()
        super().__init__()

    def __getattr__(self, name: str) -> Any:
        return getattr(Nothing(), name)

    def _has_no(self, method: str) -> None:
        return None


#: What ``log_with`` takes besides a name.
Tracker = Logger | GeneralTracker | type[GeneralTracker]
_classes: dict[str, type[GeneralTracker]] = {
    "csv": CSVTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandBTracker,
}


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let ``log_with`` know a tracker class by its ``name``. A built-in one of that name is replaced, which is said.

    Raises:
        ValueError: it is no :class:`GeneralTracker` class, or has no ``name`` or ``requires_logging_directory``.
    """
    if not _is_tracker_class(tracker_class):
        raise ValueError(
            f"register_tracker_class got {tracker_class!r}, which is not a subclass of GeneralTracker. Pass the class "
            "itself, not an object of it."
        )
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not name or not hasattr(tracker_class, "requires_logging_directory"):
        raise ValueError(
            f"register_tracker_class({tracker_class.__name__}): the class needs name = '...' and "
            "requires_logging_directory = True or False, which are read before an object is made."
        )
    if _classes.get(name, tracker_class) is not tracker_class:
        messages.warn(
            f"The tracker {name!r} was {_classes[name].__name__} and is {tracker_class.__name__} from now on. Give "
            "the class another name to keep both."
        )
    _classes[name] = tracker_class


def get_available_trackers() -> list[str]:
    """The names of all trackers whose packages are installed."""
    return [name for name, kind in _classes.items() if _lacks(kind) is None]


def filter_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[Any]:
    """What ``log_with`` asks for, each once: names, classes and objects.

    Args:
        log_with: a name or several with commas, a ``LoggerType``, a :class:`GeneralTracker` object or class, a
            Paceline logger, or a list of these. ``"all"`` takes every tracker that can work here.
        logging_dir: where trackers that write files may do so.

    Raises:
        ValueError: a name that nobody knows, or a tracker that writes files without a ``logging_dir``.
        TypeError: something that is no tracker.
        ModuleNotFoundError: a tracker that was asked for by name needs a package that is not installed.
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
            f"log_with='all' leaves out {messages.names(homeless, last='and')}: there is no directory to write to. "
            "Set Accelerator(project_dir='...')."
        )
    return [name for name in available if name not in homeless]


def _checked(one: Any, logging_dir: Any) -> Any:
    if isinstance(one, Logger | GeneralTracker):
        return one
    if not isinstance(one, str) and not _is_tracker_class(one):
        raise TypeError(
            f"log_with got {one!r} (of type {type(one).__name__}), which is no tracker. Pass a name such as 'wandb', "
            "a GeneralTracker object or class, or one of Paceline's loggers."
        )
    if isinstance(one, str) and one in _ELSEWHERE and one not in _classes:
        raise NotImplementedError(
            f"log_with={one!r}: Paceline has no tracker for it. Write one (a subclass of GeneralTracker with name = "
            f"{one!r}) and pass it as log_with, or choose {messages.names(['all', *_classes])}."
        )
    if isinstance(one, str) and one not in _classes:
        raise ValueError(messages.unknown("tracker", one, ["all", *_classes], ", or pass a GeneralTracker"))
    kind = _classes[one] if isinstance(one, str) else one
    missing = _lacks(kind)
    if missing is not None:
        raise ModuleNotFoundError(messages.missing(f"log_with={one!r}", missing), name=missing)
    if getattr(kind, "requires_logging_directory", False) and logging_dir is None:
        raise ValueError(
            f"log_with={one if isinstance(one, str) else kind.__name__!r} writes files, but there is no directory for "
            "them. Set Accelerator(project_dir='...'), or logging_dir in its ProjectConfiguration."
        )
    return one


def _lacks(kind: type[GeneralTracker]) -> str | None:
    package = getattr(kind, "package", None)
    return package if package is not None and not messages.is_installed(package) else None


def _is_tracker_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, GeneralTracker)


class Trackers(list[GeneralTracker]):
    """The trackers of an Accelerator, empty until ``init_trackers``.

    Nothing here talks to other processes, so all of it may also be called on the main process alone. On the others
    the list is as long, but only trackers with ``main_process_only = False`` do anything.

    Args:
        log_with: as given to the Accelerator.
        logging_dir: of its ``ProjectConfiguration``.

    Attributes:
        wanted: what ``log_with`` asks for.
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
        """Make all trackers, start them and give them the settings of the run; those of a run before are ended.

        Args:
            project_name: a folder of the logging directory, or wandb's project.
            config: the settings.
            init_kwargs: more arguments, by the tracker's name.
            logging_dir: another than the Accelerator began with.
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
        """Send the values of one step to every tracker.

        Args:
            values: numbers, or tensors of one element; texts and more as far as the trackers show them. Paceline's
                trackers leave out a value that is None; one of your own gets it.
            step: place on the x axis.
            log_kwargs: more arguments of :meth:`GeneralTracker.log`, by the tracker's name.

        Raises:
            RuntimeError: there are no trackers, because ``init_trackers`` was not called.
        """
        if not self._started and messages.is_rank_zero():
            raise RuntimeError(self._why_not(f"accelerator.log({list(values)})"))
        if log_kwargs:
            self._check_names("log_kwargs", log_kwargs)
        for tracker in self:
            tracker.log(dict(values), step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def get(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of that name, or with ``unwrap`` the object behind it.

        On a process that has none of it the answer takes every call and does nothing.

        Raises:
            ValueError: there is none of that name.
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
                raise ValueError(f"get_tracker({name!r}): there is no tracker. Set Accelerator(log_with={name!r}).")
            raise ValueError(messages.unknown("tracker", name, there))
        return found.tracker if unwrap else found  # type: ignore[attr-defined]

    def finish(self) -> None:
        """End the run in every tracker; ``init_trackers`` begins another one."""
        if self._started:
            self._started, self._ended = False, True
            for tracker in self:
                tracker.finish()

    def state_dict(self) -> dict[str, Any]:
        """Where each logger stands, for a checkpoint; empty on other processes than the main one."""
        found = self._loggers() if self._started else {}
        return {name: state for name, one in found.items() if (state := one.logger.state_dict())}

    def load_state_dict(self, states: Mapping[str, Any], newer: object = None) -> None:
        """Go on with the run that wrote a checkpoint: what it recorded after that is dropped, to be recorded again.

        Before ``init_trackers`` the states wait for it. A tracker that has recorded something in this process already
        stays as it is: nothing of a run that goes on is dropped.

        Args:
            states: of :meth:`state_dict`.
            newer: a later checkpoint of that run, if there is one; then what follows is recorded as another run.
        """
        if not messages.is_rank_zero():
            return
        if newer is not None:
            messages.info(
                f"The state that was loaded is not the newest of its run ({newer} is newer), so what follows is logged "
                "as a new run and the logs of the other one stay whole."
            )
            return
        if not self._started:
            self._resumed = dict(states)
            return
        self._resumed = {}
        going = {name: one for name, one in self._loggers().items() if name in states and one.go_on(states[name])}
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
            return f"{call} after end_training, which has closed all trackers. Call init_trackers for another run."
        if not self.wanted:
            return (
                f"{call} goes nowhere: this Accelerator has no tracker. Set Accelerator(log_with='tensorboard', "
                "project_dir='...') or another one, and call accelerator.init_trackers('my_project')."
            )
        return f"{call} before init_trackers goes nowhere. Call accelerator.init_trackers('my_project') first."


def _name(one: Any) -> str:
    """What a wanted tracker is called, before there is an object of it."""
    if isinstance(one, str):
        return one
    if isinstance(one, Logger):
        return LoggerTracker(one).name
    name = getattr(one, "name", None)
    return name if isinstance(name, str) else one.__name__


def _made(one: Any, project_name: str, logging_dir: Any, init_kwargs: Mapping[str, Mapping[str, Any]]) -> Any:
    """The tracker of a name, class or object; a stand-in where this process needs none."""
    kind: Any = _classes[one] if isinstance(one, str) else one
    if getattr(kind, "main_process_only", True) and not messages.is_rank_zero():
        return _Absent(_name(one))
    if isinstance(kind, Logger):
        return LoggerTracker(kind)
    if isinstance(kind, GeneralTracker):
        return kind
    folder = [logging_dir] if kind.requires_logging_directory else []
    return kind(project_name, *folder, **init_kwargs.get(_name(one), {}))
