"""Loggers. Each class is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import DummyLogger, Logger
    from .csv import CSVLogger
    from .tensorboard import TensorBoardLogger
    from .wandb import WandbLogger

__all__ = ["CSVLogger", "DummyLogger", "Logger", "TensorBoardLogger", "WandbLogger"]

_HOMES = {
    "CSVLogger": "csv",
    "DummyLogger": "base",
    "Logger": "base",
    "TensorBoardLogger": "tensorboard",
    "WandbLogger": "wandb",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from ..messages import did_you_mean

        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{did_you_mean(name, __all__)}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
