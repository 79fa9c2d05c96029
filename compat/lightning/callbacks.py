"""Lightning callbacks that are Paceline callbacks with different arguments."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

from ... import messages
from ...callbacks.loss_guard import LossGuard

#: Private methods of Lightning's ModelCheckpoint that Paceline has no match for.
_UNCALLED = (
    "_find_last_checkpoints",
    "_format_checkpoint_name",
    "_get_metric_interpolated_filepath_name",
    "_link_checkpoint",
    "_save_last_checkpoint",
    "_save_monitor_checkpoint",
    "_save_none_monitor_checkpoint",
    "_save_topk_checkpoint",
    "_should_remove_checkpoint",
    "_should_save_on_exception",
    "_should_save_on_train_epoch_end",
    "_should_skip_saving_checkpoint",
    "_update_best_and_save",
)


def refusing_uncalled(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ModelCheckpoint's ``__init__`` to raise a TypeError if a subclass defines a method that is never called."""

    def create(callback: Any, *args: Any, **kwargs: Any) -> None:
        found = [name for name in _UNCALLED if hasattr(type(callback), name)]
        if found:
            raise TypeError(
                f"{type(callback).__name__} defines {messages.names(found, last='and')}, which Paceline never calls. "
                "Override _monitor_candidates, _save_checkpoint, _remove_checkpoint, "
                "format_checkpoint_name or a hook instead, or rename it if only your code calls it."
            )
        init(callback, *args, **kwargs)

    return create


def warning_without_validation(has_value: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Wrap ``_monitor_has_value`` to warn, and not raise, if a fit without validation never logs the metric.

    With ``fast_dev_run``, nothing is said.
    """

    def warn(callback: Any, trainer: Any) -> bool:
        if trainer.fast_dev_run:
            return False
        try:
            return has_value(callback, trainer)
        except ValueError as error:
            if trainer.enable_validation:
                raise
            messages.warn_once(
                f"{error} No checkpoint is ranked by it, so there is no best checkpoint.",
                key=f"ModelCheckpoint {callback.monitor}",
            )
            return False

    return warn


def raising_runtime_error(value: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap ``EarlyStopping._value`` to raise a RuntimeError, as in Lightning, if the metric was never logged.

    With ``fast_dev_run``, nothing is checked.
    """

    def read(callback: Any, trainer: Any) -> Any:
        if trainer.fast_dev_run:
            return None
        try:
            return value(callback, trainer)
        except ValueError as error:
            raise RuntimeError(*error.args) from None

    return read


def stats_hooks() -> dict[str, Callable[..., None]]:
    """Return hooks that log the statistics of ``DeviceStatsMonitor`` at the start and end of batches in all stages."""

    def hook(name: str) -> Callable[..., None]:
        return lambda monitor, trainer, *_: monitor._log(trainer, name)

    names = [f"on_{stage}_batch_{moment}" for stage in ("train", "validation", "test") for moment in ("start", "end")]
    return {name: hook(name) for name in names if name != "on_train_batch_end"}


class SpikeDetection(LossGuard):
    """:class:`LossGuard` with Lightning's arguments and defaults. A spike raises ``TrainingSpikeException``."""

    def __init__(
        self,
        mode: Literal["min", "max"] = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: str | os.PathLike[str] | None = None,
        finite_only: bool = True,
    ) -> None:
        super().__init__(mode, window, warmup, atol, rtol, exclude_batches_path, finite_only, action="raise")
