"""Dicts of logged values. The error for a missing name says when its value will be available."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from .. import messages

if TYPE_CHECKING:
    from torch import Tensor

    from .metric_reductions import Record
    from .metrics import MetricStore

Value = TypeVar("Value")

_ENDS = {"train": "the training epoch", "validate": "the validation", "test": "the test"}


class MissingValueError(KeyError):
    """Raised if ``name`` has no value; ``text`` says why, and when the value will exist."""

    def __init__(self, name: Any, text: str = "") -> None:
        super().__init__(name)
        self.text = text

    def __str__(self) -> str:
        return self.text or super().__str__()

    def __reduce__(self) -> Any:
        return type(self), (*self.args, self.text)


class LoggedValues(dict[str, Value]):
    """A dict of logged values; ``why`` explains why a name is missing. Copies and pickles of it are ordinary dicts."""

    __slots__ = ("_why",)

    def __init__(self, values: Mapping[str, Value], why: Callable[[LoggedValues[Value], str], str]) -> None:
        super().__init__(values)
        self._why = why

    def __missing__(self, name: str) -> Value:
        raise MissingValueError(name, self._why(self, name))

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter(self.items())  # torch.load(weights_only=True) accepts this class


class CallbackValues(LoggedValues["Tensor"]):
    """The dict ``trainer.callback_metrics``. A value set here can be monitored until the same name is logged."""

    __slots__ = ("_store",)

    def __init__(self, store: MetricStore, why: Callable[[LoggedValues[Tensor], str], str]) -> None:
        super().__init__(store.callback_metrics(), why)
        self._store = store

    def __setitem__(self, name: str, value: Tensor) -> None:
        super().__setitem__(name, value)
        self._store.give(name, value)

    def update(self, *args: Any, **kwargs: Tensor) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value


def callback_values(store: MetricStore) -> CallbackValues:
    """Return the dict ``trainer.callback_metrics``."""

    def held_back(stage: str, record: Record, name: str) -> str:
        if record.options.rank_zero_only:
            return "logged with rank_zero_only=True, so it cannot be monitored"
        of_step = record.on_step and name == record.step_key
        return "an evaluation's step value, which goes only to the loggers" if of_step and stage != "train" else ""

    return CallbackValues(store, partial(_why, store, held_back))


def bar_values(store: MetricStore) -> LoggedValues[float]:
    """Return the dict ``trainer.progress_bar_metrics``."""

    def held_back(stage: str, record: Record, name: str) -> str:
        return "" if record.options.prog_bar else "logged without prog_bar=True"

    return LoggedValues(store.progress_bar_metrics(), partial(_why, store, held_back))


def sent_values(store: MetricStore) -> LoggedValues[float]:
    """Return the dict ``trainer.logged_metrics``."""

    def held_back(stage: str, record: Record, name: str) -> str:
        if not record.logger:
            return "logged with logger=False"
        waits = record.on_step and name == record.step_key
        return "a step value, which goes to the loggers every log_every_n_steps steps" if waits else ""

    return LoggedValues(store.sent, partial(_why, store, held_back))


def _why(store: MetricStore, held_back: Callable[[str, Record, str], str], there: Mapping[str, Any], name: str) -> str:
    """Return why ``name`` has no value, and when it will have one."""
    listed = f"Available: {messages.names(sorted(there), 'and')}." if there else "Nothing is available yet."
    for stage, record in store.known():
        if name not in record.keys:
            continue
        reason = held_back(stage, record, name)
        if reason:
            return f"{name!r} is {reason}. {listed}"
        if record.on_epoch and (name == record.epoch_key or not record.on_step):
            return (
                f"{name!r} is logged with on_epoch=True, on_step={record.on_step}, so it appears at the end of "
                f"{_ENDS.get(stage, 'the epoch')}. {listed}"
            )
        return f"{name!r} has not been logged in this epoch yet. {listed}"
    choices = {*there, *(key for _, record in store.known() for key in record.keys)}
    return (
        f"{name!r} has not been logged yet.{messages.did_you_mean(name, choices)} {listed} It appears after the first "
        f"self.log({name!r}, ...), or, with on_epoch=True, at the end of the epoch."
    )
