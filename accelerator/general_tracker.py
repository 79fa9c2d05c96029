"""The base class for trackers, and a tracker that wraps one of Paceline's loggers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar, cast

from .. import messages
from ..loggers.base import Logger
from ..loggers.values import present

F = TypeVar("F", bound=Callable[..., Any])
#: Names of trackers, keyed by the class name of the logger that they wrap.
NAMES = {
    "AimLogger": "aim",
    "CSVLogger": "csv",
    "ClearMLLogger": "clearml",
    "CometLogger": "comet_ml",
    "DVCLiveLogger": "dvclive",
    "MLFlowLogger": "mlflow",
    "SwanLabLogger": "swanlab",
    "TensorBoardLogger": "tensorboard",
    "TrackioLogger": "trackio",
    "WandbLogger": "wandb",
}


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

    A class that you pass is called with the project's name, the logging directory if ``requires_logging_directory`` is
    True, and its ``init_kwargs``. Its constructor must not communicate with other processes, which may not have joined
    the process group yet.

    Attributes:
        name: the tracker's name in ``get_tracker``, ``init_kwargs`` and ``log_kwargs``.
        requires_logging_directory: whether the tracker writes files; if so, ``project_dir`` is required.
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
        """Open files and connections. ``init_trackers`` calls this once the processes have joined the process group."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the run's settings, which are passed as a dict."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record the values of one step: numbers, strings, or other values that the tracker supports.

        Args:
            values: the values, keyed by name.
            step: position on the x-axis.
            **kwargs: this tracker's entry in ``log_kwargs``.
        """

    def finish(self) -> None:
        """Write everything that is still buffered. ``end_training`` calls this."""

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record several images under each name."""
        self._has_no("log_images")

    def log_table(self, table_name: str, *args: Any, step: int | None = None, **kwargs: Any) -> None:
        """Record a table, passed as columns and rows or as a data frame."""
        self._has_no("log_table")

    def log_figure(self, name: str, figure: Any, step: int | None = None, **kwargs: Any) -> None:
        """Record a matplotlib figure."""
        self._has_no("log_figure")

    def log_artifact(self, path: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save a file or folder with the run."""
        self._has_no("log_artifact")

    def _has_no(self, method: str) -> None:
        raise NotImplementedError(
            f"The tracker {self.name!r} ({type(self).__name__}) has no {method}. Define this method in the class, or "
            f"use the object that the tracker wraps: accelerator.get_tracker({self.name!r}, unwrap=True)."
        )


def _by_logger(method: str) -> Any:
    """Create a tracker method that calls the logger's method of the same name."""

    def record(self: LoggerTracker, *args: Any, **kwargs: Any) -> None:
        self._call(method, method, *args, **kwargs)

    record.__name__, record.__doc__ = method, getattr(GeneralTracker, method).__doc__
    return on_main_process(record)


class LoggerTracker(GeneralTracker):
    """Wraps one of Paceline's loggers as a tracker.

    The logger opens nothing before the first value is logged, so ``load_state`` can still continue the saved run.
    """

    name = "logger"
    requires_logging_directory = False
    #: The package that the logger needs.
    package: ClassVar[str | None] = None

    @classmethod
    def is_available(cls) -> bool:
        """Return True if everything that the tracker needs with its default arguments is installed."""
        return cls.package is None or messages.is_installed(cls.package)

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._config: dict[str, Any] = {}
        self._settled = True
        #: Whether this process has recorded something; if so, it can no longer continue another run.
        self.is_used = False
        if type(self) is LoggerTracker:
            kind = type(logger).__name__
            self.name = NAMES.get(kind, kind)
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
