"""The loggers and callbacks of a run: the user's, and those that come by default."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..callbacks.base import Callback
from ..loggers.base import DummyLogger, Logger

if TYPE_CHECKING:
    from .trainer import Trainer


def choose_loggers(logger: Any, trainer: Trainer) -> list[Logger]:
    """The loggers for ``Trainer(logger=...)``."""
    if logger is False or trainer.barebones:
        return []
    if trainer.fast_dev_run:
        return [DummyLogger()]
    if logger is None or logger is True:
        from ..loggers.tensorboard import TensorBoardLogger

        return [TensorBoardLogger(trainer.default_root_dir)]
    found = list(logger) if isinstance(logger, Iterable) else [logger]
    for one in found:
        if not isinstance(one, Logger):
            raise TypeError(
                f"Trainer(logger=...) got a {type(one).__name__} ({one!r}). Pass True for TensorBoard, False for "
                "none, a Logger or "
                "a list of Loggers."
            )
    return found


def choose_callbacks(callbacks: Any, given: Mapping[str, Any], trainer: Trainer) -> list[Callback]:
    """The user's callbacks in their order, the defaults that are not there yet, those that save last."""
    from ..callbacks.model_checkpoint import ModelCheckpoint
    from ..callbacks.model_summary import ModelSummary
    from ..callbacks.progress import ProgressBar
    from ..callbacks.timer import Timer

    found = [] if callbacks is None else [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    for one in found:
        if not isinstance(one, Callback):
            hint = f" Did you mean {one.__name__}()?" if isinstance(one, type) and issubclass(one, Callback) else ""
            raise TypeError(
                f"Trainer(callbacks=...) got {one!r}, which is not a Callback.{hint} Pass Callback objects."
            )
    for name, kind in (
        ("enable_progress_bar", ProgressBar),
        ("enable_model_summary", ModelSummary),
        ("enable_checkpointing", ModelCheckpoint),
    ):
        asked = next((c for c in found if isinstance(c, kind)), None)
        if asked is None and given[name] is not False and not trainer.barebones:
            found.append(_default(kind))
        elif asked is not None and (given[name] is False or trainer.barebones):
            flag = f"{name}=False" if given[name] is False else "barebones=True"
            raise ValueError(
                f"Trainer({flag}) contradicts the {type(asked).__name__} among its callbacks. Leave one of them out."
            )
    if given["max_time"] is not None:
        if any(isinstance(c, Timer) for c in found):
            raise ValueError(
                f"Trainer(max_time={given['max_time']!r}) contradicts the Timer among its callbacks. Leave one of "
                "them out."
            )
        found.append(Timer(duration=given["max_time"]))
    return order(found)


def _default(kind: type[Callback]) -> Callback:
    from ..callbacks.progress import ProgressBar

    if kind is ProgressBar:
        from ..callbacks.rich_progress import RichProgressBar

        return RichProgressBar()
    return kind()


def order(callbacks: list[Callback]) -> list[Callback]:
    """Callbacks that save come last, so that they save what the others did."""
    from ..callbacks.model_checkpoint import ModelCheckpoint
    from ..callbacks.on_exception_checkpoint import OnExceptionCheckpoint

    last = (ModelCheckpoint, OnExceptionCheckpoint)
    return [c for c in callbacks if not isinstance(c, last)] + [c for c in callbacks if isinstance(c, last)]


def check_state_keys(callbacks: list[Callback]) -> None:
    """Raise if two callbacks would save their state under one key."""
    seen: dict[str, Callback] = {}
    for callback in callbacks:
        key = callback.state_key
        if key in seen and type(callback).state_dict is not Callback.state_dict:
            raise ValueError(
                f"Two callbacks save their state under one key {key!r} ({type(seen[key]).__name__} and "
                f"{type(callback).__name__}), so one would overwrite the other. Give one another state_key, or "
                "remove it."
            )
        seen[key] = callback
