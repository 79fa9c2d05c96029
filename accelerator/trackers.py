"""Trackers for ``accelerator.log``. The built-in trackers use Paceline's loggers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from torch import Tensor

from .. import messages
from ..checkpoint.logger_positions import named, say_where
from ..loggers.base import Logger, Nothing
from ..processes.device_transfer import full_value
from .general_tracker import GeneralTracker, LoggerTracker
from .general_tracker import on_main_process as on_main_process
from .logger_trackers import (
    AimTracker,
    ClearMLTracker,
    CometMLTracker,
    CSVTracker,
    DVCLiveTracker,
    MLflowTracker,
    SwanLabTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)


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
#: The trackers that ``log_with`` takes by name.
BUILT_IN: tuple[type[LoggerTracker], ...] = (
    *(CSVTracker, TensorBoardTracker, WandBTracker, MLflowTracker, CometMLTracker, TrackioTracker),
    *(ClearMLTracker, DVCLiveTracker, SwanLabTracker, AimTracker),
)
_classes: dict[str, type[GeneralTracker]] = {kind.name: kind for kind in BUILT_IN}


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
            f"register_tracker_class({tracker_class.__name__}): the class must define name = '...' and "
            "requires_logging_directory = True or False, because both are read before the tracker is created."
        )
    if _classes.get(name, tracker_class) is not tracker_class:
        messages.warn(
            f"The tracker {name!r} now uses {tracker_class.__name__} instead of {_classes[name].__name__}. Give the "
            "class another name to keep both."
        )
    _classes[name] = tracker_class


def get_available_trackers() -> list[str]:
    """Return the names of all trackers whose packages are installed."""
    return [name for name, kind in _classes.items() if not issubclass(kind, LoggerTracker) or kind.is_available()]


def filter_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[Any]:
    """Return the names, classes and objects of the requested trackers without duplicates.

    Args:
        log_with: a name or several names separated by commas, a ``LoggerType``, a :class:`GeneralTracker` object or
            class, a Paceline logger, or a list of these. ``"all"`` means every tracker that can be created.
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
            "to. Set Accelerator(project_dir='...')."
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
    if isinstance(one, str) and one not in _classes:
        raise ValueError(messages.unknown("tracker", one, ["all", *_classes], ", or pass a GeneralTracker"))
    kind = _classes[one] if isinstance(one, str) else one
    missing = _lacks(kind)
    if missing is not None:
        raise ModuleNotFoundError(messages.missing(f"log_with={one!r}", missing), name=missing)
    if getattr(kind, "requires_logging_directory", False) and logging_dir is None:
        raise ValueError(
            f"log_with={one if isinstance(one, str) else kind.__name__!r} writes files, but no directory is set. "
            "Set Accelerator(project_dir='...'), or logging_dir in its ProjectConfiguration."
        )
    return one


def _lacks(kind: type[GeneralTracker]) -> str | None:
    package = getattr(kind, "package", None)
    return package if package is not None and not messages.is_installed(package) else None


def _is_tracker_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, GeneralTracker)


class Trackers(list[GeneralTracker]):
    """An Accelerator's trackers; empty until ``init_trackers``.

    No method communicates with other processes, so each method may be called on the main process alone. Other processes
    have the same list, but only trackers with ``main_process_only = False`` do anything there.

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
            project_name: name of the folder in the logging directory, or of the project in the tracking service.
            config: the run's settings.
            init_kwargs: additional arguments, keyed by tracker name.
            logging_dir: directory to use instead of the Accelerator's logging directory.
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

    @property
    def idle(self) -> bool:
        """Whether nothing can be logged, because ``init_trackers`` was not called, or there is no tracker."""
        return not self._started and not (self._ended and self)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log the values of one step to every tracker.

        Args:
            values: numbers, single-element tensors, and other values that the trackers support. Paceline's trackers
                skip values that are None. All processes must call this if a value comes from a sharded tensor (a norm
                under FSDP).
            step: position on the x-axis.
            log_kwargs: additional arguments for :meth:`GeneralTracker.log`, keyed by tracker name.

        Raises:
            RuntimeError: ``init_trackers`` was not called.
        """
        if not self._started and messages.is_rank_zero():
            raise RuntimeError(self._why_not(f"accelerator.log({list(values)})"))
        if log_kwargs:
            self._check_names("log_kwargs", log_kwargs)
        values = {name: full_value(value) if isinstance(value, Tensor) else value for name, value in values.items()}
        for tracker in self:
            tracker.log(dict(values), step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def get(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker with the given name, or the object that the tracker wraps if ``unwrap`` is True.

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
                raise ValueError(
                    f"get_tracker({name!r}): this Accelerator has no trackers. Set Accelerator(log_with={name!r})."
                )
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
        """Continue the checkpoint's runs, and drop values recorded after the checkpoint, which will be recorded again.

        If ``init_trackers`` has not been called yet, the states are kept until that call. A tracker that has already
        recorded something in this process is not changed.

        Args:
            states: result of :meth:`state_dict`.
            newer: folder with a later state of the run that saved ``states``, or None. If there is one, logging
                continues as a new run.
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
        wanted = [_name(one) for one in self.wanted]
        names = [*_classes, *wanted]
        for name in options:
            if name not in names:
                raise ValueError(f"{what}: {messages.unknown('tracker', name, dict.fromkeys(names))}")
            if name not in wanted:
                messages.ignored(what, "log_with does not include this tracker", **{name: "..."})

    def _why_not(self, call: str) -> str:
        if self._ended:
            return f"{call} was called after end_training closed all trackers. Call init_trackers for another run."
        if not self.wanted:
            return (
                f"{call} has no effect, because this Accelerator has no tracker. Choose a tracker, for example with "
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
    """Create a tracker from a name, class or object; if this process needs none, create a placeholder."""
    kind: Any = _classes[one] if isinstance(one, str) else one
    if getattr(kind, "main_process_only", True) and not messages.is_rank_zero():
        return _Absent(_name(one))
    if isinstance(kind, (Logger, GeneralTracker)):
        given = {_name(one): init_kwargs.get(_name(one))}
        messages.ignored(
            "init_kwargs",
            "log_with contains an existing tracker object, which was created with its own arguments",
            **given,
        )
        return LoggerTracker(kind) if isinstance(kind, Logger) else kind
    folder = [logging_dir] if kind.requires_logging_directory else []
    return kind(project_name, *folder, **init_kwargs.get(_name(one), {}))
