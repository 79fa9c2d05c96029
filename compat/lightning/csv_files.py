"""Lightning's CSVLogger, which deletes the file of an earlier run with the same version, and also logs strings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ... import messages
from ...loggers.csv import ExperimentWriter


def noting_old_files(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap CSVLogger's ``__init__`` to record when the file of the given version was last written."""

    def create(logger: Any, *args: Any, **kwargs: Any) -> None:
        init(logger, *args, **kwargs)
        logger.earlier_file = _written_at(logger) if logger._is_named else None

    return create


def deleting_old_files(open_writer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap CSVLogger's ``_open`` to delete a file from an earlier run, with a warning.

    The file is kept if a resumed fit continues it, or if it has been changed since the logger was created.
    """

    def open_new(logger: Any) -> Any:
        if logger.earlier_file is not None and not logger._run_marked and _written_at(logger) == logger.earlier_file:
            path = _path(logger)
            messages.warn(
                f"The log directory {logger.log_dir} exists and is not empty. {path} will be deleted, because a new "
                "run starts a new file there. To log to a new folder instead, leave out version=."
            )
            os.remove(path)
        return open_writer(logger)

    return open_new


def log_metrics(logger: Any, metrics: Mapping[str, Any], step: int | None = None) -> None:
    """Log numbers and strings for one step."""
    logger.log_record(metrics, step)


def _path(logger: Any) -> str:
    return os.path.join(logger.log_dir, ExperimentWriter.NAME_METRICS_FILE)


def _written_at(logger: Any) -> int | None:
    """Return when the logger's file was last written, in nanoseconds; None if there is no file."""
    try:
        return os.stat(_path(logger)).st_mtime_ns
    except FileNotFoundError:
        return None
