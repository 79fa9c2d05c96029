"""Choose a run's loggers and callbacks: the user's and the defaults."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from .. import messages
from ..callbacks.base import Callback, overridden
from ..callbacks.checkpoint_retention import Checkpoint
from ..callbacks.model_checkpoint import ModelCheckpoint
from ..callbacks.model_summary import ModelSummary
from ..callbacks.progress import ProgressBar
from ..callbacks.timer import Timer, to_timedelta
from ..checkpoint import storage
from ..loggers.base import DummyLogger, Logger

if TYPE_CHECKING:
    from .trainer import Trainer


#: Groups of entry points. Each entry point names a function that takes no arguments and returns one or more callbacks.
ENTRY_POINTS = ["paceline.callbacks"]

#: The Trainer's switches, with the class of the callback that each adds.
SWITCHED: dict[str, type[Callback]] = {
    "enable_progress_bar": ProgressBar,
    "enable_model_summary": ModelSummary,
    "enable_checkpointing": ModelCheckpoint,
}


def choose_loggers(logger: Any, trainer: Trainer) -> list[Logger]:
    """Return the loggers for ``Trainer(logger=...)``."""
    if logger is False:
        return []
    found = _given_loggers(logger)
    if trainer.barebones:
        return []
    if trainer.fast_dev_run:
        return [DummyLogger()]
    if found is None:
        from ..loggers.tensorboard import TensorBoardLogger

        return [TensorBoardLogger(_folder_of_logs(trainer.default_root_dir))]
    return found


def _folder_of_logs(root: str) -> str:
    if not storage.is_remote(root):
        return root
    messages.info_once(
        f"Checkpoints are written to {root}, but logs are written to the working directory {os.getcwd()}. Pass a "
        "logger to choose another folder, or logger=False to turn logging off."
    )
    return os.getcwd()


def is_logger(value: Any) -> bool:
    """Return True if a Trainer can log to the object."""
    return isinstance(value, Logger)


def _given_loggers(logger: Any) -> list[Logger] | None:
    if logger is None or logger is True:
        return None
    several = isinstance(logger, Iterable) and not isinstance(logger, (str, Mapping))
    found: list[Any] = list(logger) if several else [logger]
    for one in found:
        if not is_logger(one):
            hint = f" Did you mean {one.__name__}(...)?" if isinstance(one, type) and issubclass(one, Logger) else ""
            raise TypeError(
                f"Trainer(logger={logger!r}) got {messages.a(one)} as a logger.{hint} Pass a Logger, a list of "
                "Loggers, True for TensorBoard, or False for no logger."
            )
    return found


def choose_callbacks(callbacks: Any, max_time: Any, grace_seconds: float, trainer: Trainer) -> list[Callback]:
    """Return the user's callbacks and the default ones, in call order."""
    found = _given_callbacks(callbacks)
    refuse_switched_off(found, trainer)
    _refuse_several_bars(found)
    if not trainer.barebones:
        found += [brought for brought in _from_packages() if not any(type(c) is type(brought) for c in found)]
    for name, kind in SWITCHED.items():
        wanted = getattr(trainer, name) is not False and not trainer.barebones
        if wanted and not any(isinstance(c, kind) for c in found):
            found.append(_default(kind))
    if max_time is not None:
        timer = Timer(to_timedelta(max_time, "Trainer(max_time=)"), grace_seconds=grace_seconds)
        if any(callback.state_key == timer.state_key for callback in found):
            raise ValueError(
                f"Trainer(max_time={max_time!r}) contradicts the Timer among its callbacks. Leave out one of them."
            )
        found.append(timer)
    elif grace_seconds:
        raise ValueError(
            f"Trainer(grace_seconds={grace_seconds!r}) has no effect without max_time, because there is no time limit "
            "to stop before. Pass max_time, or leave out grace_seconds."
        )
    check_state_keys(found)
    return order(found)


def _from_packages() -> list[Callback]:
    """Return the callbacks that installed packages add to every Trainer.

    If the user passes a callback of the same class, it replaces the package's.
    """
    found: list[Callback] = []
    for point in _points(tuple(ENTRY_POINTS), tuple(sys.path)):
        made = point.load()()
        made = list(made) if isinstance(made, Iterable) else [made]
        wrong = [one for one in made if not isinstance(one, Callback)]
        if wrong:
            raise TypeError(
                f"The entry point {point.name!r} ({point.value}) of the group {point.group!r} returned {wrong[0]!r}, "
                "which is not a Callback. Uninstall the package that provides it, or report the problem to its authors."
            )
        names = messages.names((type(one).__name__ for one in made), last="and")
        messages.info_once(f"The entry point {point.name!r} ({point.value}) adds {names} to the callbacks.")
        found += made
    return found


@functools.cache
def _points(groups: tuple[str, ...], path: tuple[str, ...]) -> list[EntryPoint]:
    """Return the entry points of installed packages, searched once per ``sys.path`` because the search is slow."""
    found = {(point.name, point.value): point for group in groups for point in entry_points(group=group)}
    return list(found.values())  # a package may list the same callbacks in several groups


def _given_callbacks(callbacks: Any) -> list[Callback]:
    several = isinstance(callbacks, Iterable) and not isinstance(callbacks, (str, Mapping, Callback))
    found: list[Any] = [] if callbacks is None else list(callbacks) if several else [callbacks]
    for one in found:
        if not isinstance(one, Callback):
            hint = f" Did you mean {one.__name__}()?" if isinstance(one, type) and issubclass(one, Callback) else ""
            raise TypeError(
                f"Trainer(callbacks=...) got {one!r}, which is not a Callback.{hint} Pass Callback objects."
            )
    return found


def refuse_switched_off(callbacks: list[Callback], trainer: Trainer) -> None:
    """Raise if the user passes a callback whose kind is switched off (``enable_checkpointing=False``, for example)."""
    for name, kind in SWITCHED.items():
        off = getattr(trainer, name) is False
        asked = next((c for c in callbacks if isinstance(c, kind)), None)
        if asked is not None and (off or trainer.barebones):
            flag = f"{name}=False" if off else "barebones=True"
            raise ValueError(
                f"Trainer({flag}) contradicts the {type(asked).__name__} among its callbacks. Leave out one of them."
            )


def _refuse_several_bars(callbacks: list[Callback]) -> None:
    bars = [type(one).__name__ for one in callbacks if isinstance(one, ProgressBar)]
    if len(bars) > 1:
        raise ValueError(
            f"Trainer(callbacks=...) got {messages.names(bars, last='and')}, which would draw over each other. Pass "
            "one progress bar."
        )


def _default(kind: type[Callback]) -> Callback:
    if kind is ProgressBar:
        from ..callbacks.rich_progress import RichProgressBar

        return RichProgressBar()
    return kind()


def order(callbacks: list[Callback]) -> list[Callback]:
    """Move callbacks with ``runs_first`` to the front and those that save to the end."""
    saving = [c for c in callbacks if isinstance(c, Checkpoint)]
    others = [c for c in callbacks if not isinstance(c, Checkpoint)]
    return [*(c for c in others if c.runs_first), *(c for c in others if not c.runs_first), *saving]


def check_state_keys(callbacks: list[Callback]) -> None:
    """Raise if a callback is passed twice, or if two callbacks would save their state under the same key."""
    seen: dict[str, Callback] = {}
    for place, callback in enumerate(callbacks):
        name = type(callback).__name__
        if any(callback is other for other in callbacks[:place]):
            raise ValueError(
                f"The callbacks contain the same {name} twice, so all its hooks would run twice. Remove one of them."
            )
        key = callback.state_key
        if key in seen and (_keeps_state(callback) or _keeps_state(seen[key])):
            raise ValueError(
                f"Two callbacks save their state under the same key {key!r} ({type(seen[key]).__name__} and {name}), "
                "so one would overwrite the other. Remove one of them, or give one a different key with a subclass: "
                f"class Second{name}({name}): state_key = 'Second{name}'"
            )
        seen[key] = callback


def _keeps_state(callback: Callback) -> bool:
    return overridden(callback, "state_dict", Callback) is not None
