"""The command line. Each command has its own file, which is imported only when the command runs.

:class:`TrainerCLI`, which is imported on first use, builds a command line for your own program from your classes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .argument_parser import (
        ArgsType,
        ArgumentParser,
        LRSchedulerCallable,
        OptimizerCallable,
        ReduceLROnPlateau,
        instantiate_class,
    )
    from .trainer_cli import SaveConfigCallback, TrainerCLI

__all__ = [
    "ArgsType",
    "ArgumentParser",
    "LRSchedulerCallable",
    "OptimizerCallable",
    "ReduceLROnPlateau",
    "SaveConfigCallback",
    "TrainerCLI",
    "instantiate_class",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = "trainer_cli" if name in ("SaveConfigCallback", "TrainerCLI") else "argument_parser"
    value = globals()[name] = getattr(import_module(f".{file}", __name__), name)
    return value
