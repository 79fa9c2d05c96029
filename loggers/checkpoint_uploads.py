"""A base class for loggers that upload checkpoints to a service."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from .. import messages
from .base import Logger
from .values import plain

#: When checkpoints are uploaded: ``"all"`` when they are written, True at the end of the run, False never.
LogModel = Literal["all"] | bool


class CheckpointUploads(Logger):
    """Base class of loggers that upload each file that a ``ModelCheckpoint`` keeps, whenever the file changes.

    Args:
        log_model: when to upload: ``"all"`` (when a file is written), True (at the end of the run) or False (never).
    """

    def __init__(self, log_model: LogModel) -> None:
        if log_model not in (True, False, "all"):
            raise ValueError(messages.unknown("log_model", log_model, ["all"], more=", True or False"))
        self._log_model: LogModel = log_model
        self._checkpoint_callback: Any = None
        self._uploaded: dict[str, int] = {}

    @abstractmethod
    def _upload(self, path: str, about: Mapping[str, Any], is_best: bool) -> None:
        """Upload one file or folder; ``about`` is plain data that describes it."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Upload the callback's files now if ``log_model="all"``, or at the end of the run if ``log_model=True``."""
        if self._log_model == "all":
            self._upload_checkpoints(checkpoint_callback)
        elif self._log_model:
            self._checkpoint_callback = checkpoint_callback

    def _upload_the_rest(self) -> None:
        """Upload the files whose upload was deferred to the end of the run."""
        if self._checkpoint_callback is not None:
            self._upload_checkpoints(self._checkpoint_callback)

    def _upload_checkpoints(self, callback: Any) -> None:
        for path, score in _checkpoints(callback, type(self).__name__).items():
            changed = os.stat(path).st_mtime_ns
            if self._uploaded.get(path) == changed:
                continue
            about = {"score": score, "original_filename": Path(path).name, type(callback).__name__: _settings(callback)}
            self._upload(path, about, path == getattr(callback, "best_model_path", None))
            self._uploaded[path] = changed


def _checkpoints(callback: Any, who: str) -> dict[str, float | None]:
    """Return the files that a checkpoint callback keeps, oldest first, with their scores."""
    scores: dict[str, Any] = dict(getattr(callback, "best_k_models", None) or {})
    best = getattr(callback, "best_model_path", None)
    scores.setdefault(best or "", getattr(callback, "best_model_score", None))
    scores.setdefault(getattr(callback, "last_model_path", None) or "", getattr(callback, "current_score", None))
    away = [path for path in scores if "://" in path]
    if away:
        messages.warn_once(
            f"{who}(log_model=...) uploads local checkpoints only, so {away[0]} is not uploaded. Remove "
            "log_model, or save to a local dirpath.",
            key=f"{who} log_model",
        )
    there = [path for path in scores if path and os.path.exists(path)]
    there.sort(key=os.path.getmtime)
    return {path: None if scores[path] is None else float(scores[path]) for path in there}


def _settings(callback: Any) -> dict[str, Any]:
    names = ("monitor", "mode", "save_last", "save_top_k", "save_weights_only")
    return {name: plain(getattr(callback, name)) for name in names if hasattr(callback, name)}
