"""Paceline trains PyTorch models: subclass :class:`TrainingModule`, hand it to a :class:`Trainer`.

Every public name is loaded when it is first used, so ``import paceline`` costs next to nothing (not even torch).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import callbacks, loggers, strategies
    from .callbacks.base import Callback
    from .trainer.data.combined import CombinedLoader
    from .trainer.data.datamodule import DataModule
    from .trainer.memory import find_executable_batch_size
    from .trainer.module import TrainingModule
    from .trainer.seed import seed_everything
    from .trainer.trainer import Trainer
    from .trainer.verify import verify

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "CombinedLoader",
    "DataModule",
    "Trainer",
    "TrainingModule",
    "__version__",
    "callbacks",
    "find_executable_batch_size",
    "loggers",
    "seed_everything",
    "strategies",
    "verify",
]

_HOME = {
    "Callback": ".callbacks.base",
    "CombinedLoader": ".trainer.data.combined",
    "DataModule": ".trainer.data.datamodule",
    "Trainer": ".trainer.trainer",
    "TrainingModule": ".trainer.module",
    "find_executable_batch_size": ".trainer.memory",
    "seed_everything": ".trainer.seed",
    "verify": ".trainer.verify",
}
_ROOMS = ("callbacks", "loggers", "strategies", "trainer")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOME:
        from .loggers.messages import did_you_mean

        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{did_you_mean(name, __all__)}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
