"""Adapts Paceline's callbacks to the arguments and methods of Lightning's callbacks."""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import signature
from typing import Any, Literal

from ... import messages
from ...callbacks.loss_guard import LossGuard
from ...callbacks.lr_monitor import schedulers_of
from ...callbacks.model_summary import Summary, human_readable, table
from ...checkpoint import storage
from ...loggers.base import Logger

#: Private methods of Lightning's ModelCheckpoint that have no equivalent in Paceline.
_UNCALLED = (
    "_find_last_checkpoints",
    "_format_checkpoint_name",
    "_get_metric_interpolated_filepath_name",
    "_link_checkpoint",
    "_save_last_checkpoint",
    "_save_monitor_checkpoint",
    "_save_none_monitor_checkpoint",
    "_should_remove_checkpoint",
    "_should_save_on_exception",
)


def due_without_scheduler(due: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap ``_due_at_epoch`` to log the rates of optimizers without schedulers at epoch starts as well as at steps."""

    def due_at_epoch(monitor: Any, trainer: Any, optimizer: Any) -> bool:
        always = monitor.logging_interval is None and not schedulers_of(trainer, optimizer)
        return always or due(monitor, trainer, optimizer)

    return due_at_epoch


def refusing_uncalled(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ModelCheckpoint's ``__init__`` to raise a TypeError if a subclass defines a method that is never called."""

    def create(callback: Any, *args: Any, **kwargs: Any) -> None:
        found = [name for name in _UNCALLED if hasattr(type(callback), name)]
        if found:
            raise TypeError(
                f"{type(callback).__name__} defines {messages.names(found, last='and')}, which Paceline never calls. "
                "Override _monitor_candidates, _should_skip_saving_checkpoint, _should_save_on_train_epoch_end, "
                "_save_topk_checkpoint, _update_best_and_save, _save_checkpoint, _remove_checkpoint, "
                "format_checkpoint_name or a hook instead, or rename the method if only your code calls it."
            )
        init(callback, *args, **kwargs)

    return create


def with_absolute_paths(state_dict: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Wrap ModelCheckpoint's ``state_dict`` to return absolute paths and the folder of the checkpoints."""

    def collect(callback: Any) -> dict[str, Any]:
        state = state_dict(callback) | {"dirpath": callback.dirpath}
        names = ("best_model_path", "kth_best_model_path", "last_model_path", "best_k_models")
        state |= {name: getattr(callback, name) for name in names}
        return state | {"saved_path": callback._saved_path, "leftovers": list(callback._leftovers)}

    return collect


def warning_without_validation(has_value: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Wrap ``_monitor_has_value`` to warn, instead of raising, if a fit without validation never logs the metric.

    With ``fast_dev_run``, nothing is reported.
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
                f"{error} Without the metric, checkpoints are not ranked, and there is no best checkpoint.",
                key=f"ModelCheckpoint {callback.monitor}",
            )
            return False

    return warn


def in_folder_of_logger(folder: Callable[[Any, Any], str]) -> Callable[[Any, Any], str]:
    """Wrap ``_folder`` to save below the ``save_dir/name/version`` of a program's own logger."""

    def find(keeper: Any, trainer: Any) -> str:
        logger = trainer.logger
        if keeper._given_dirpath or getattr(type(logger), "log_dir", None) is not Logger.log_dir:
            return folder(keeper, trainer)
        getattr(logger, "experiment", None)  # some loggers choose their version only at this point
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        root = logger.save_dir or trainer.default_root_dir
        return storage.absolute(storage.join(os.fspath(root), str(logger.name), version, "checkpoints"))

    return find


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


def keep_keywords(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ModelSummary's ``__init__`` to accept keyword arguments for ``summarize``."""

    def create(callback: Any, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        init(callback, max_depth)
        callback.summarize_kwargs = summarize_kwargs

    return create


def handing_over_columns(hand_over: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``ModelSummary._hand_over`` to call a user-defined ``summarize`` as Lightning does, on rank 0."""

    def call(callback: Any, trainer: Any, module: Any, summary: Summary) -> None:
        if type(callback).summarize is print_columns:
            if trainer.is_global_zero:
                messages.info(f"\n{summary}")
            return
        totals = (summary.total_parameters, summary.trainable_parameters, summary.model_size)
        given = (_columns_of(summary), *totals, summary.total_training_modes)
        keywords = {"total_flops": summary.total_flops or 0} | getattr(callback, "summarize_kwargs", {})
        try:
            signature(callback.summarize).bind(*given, **keywords)
        except TypeError:
            hand_over(callback, trainer, module, summary)
            return
        if trainer.is_global_zero:
            callback.summarize(*given, **keywords)

    return call


def print_columns(
    summary_data: list[tuple[str, list[str]]],
    total_parameters: int,
    trainable_parameters: int,
    model_size: float,
    total_training_modes: dict[str, int],
    total_flops: int = 0,
    **summarize_kwargs: Any,
) -> None:
    """Print a table of the columns, and the totals, like ``ModelSummary.summarize`` but with Lightning's arguments."""
    totals = [
        f"{human_readable(trainable_parameters):<10}Trainable params",
        f"{human_readable(total_parameters - trainable_parameters):<10}Non-trainable params",
        f"{human_readable(total_parameters):<10}Total params",
        f"{model_size:<10,.3f}Size of the params (MB)",
        *(f"{number:<10}Modules in {mode} mode" for mode, number in total_training_modes.items()),
        f"{human_readable(total_flops):<10}FLOPs of a forward pass with example_input_array",
    ]
    columns = [[name, *cells] for name, cells in summary_data]
    messages.info(f"\n{table(columns, totals, messages.columns())}")


def _columns_of(summary: Summary) -> list[tuple[str, list[str]]]:
    """Return the summary's columns in the form that Lightning's ``summarize`` receives: pairs of a name and cells."""
    layers, columns = summary.layers, dict[str, list[str]]()
    modules = [layer.training is not None for layer in layers]
    columns[" "] = [str(number) if is_module else " " for number, is_module in enumerate(modules)]
    columns["Name"] = [layer.name for layer in layers]
    columns["Type"] = [layer.type for layer in layers]
    columns["Params"] = [human_readable(layer.parameters) for layer in layers]
    columns["Mode"] = ["train" if layer.training else "eval" for layer in layers]
    columns["FLOPs"] = [human_readable(layer.flops or 0) for layer in layers]
    if summary.has_sizes:
        columns["In sizes"] = [str(layer.in_size) for layer in layers]
        columns["Out sizes"] = [str(layer.out_size) for layer in layers]
    for name in ("Mode", "FLOPs", "In sizes", "Out sizes"):
        cells = columns.get(name, [])
        cells[:] = [cell if is_module else "n/a" for cell, is_module in zip(cells, modules, strict=False)]
    return list(columns.items())


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
