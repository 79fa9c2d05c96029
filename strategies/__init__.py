"""Where tensors live and who talks to whom. A name is imported when it is asked for: some files need no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import SingleDevice as SingleDevice
    from .base import Strategy as Strategy
    from .choose import choose_strategy as choose_strategy
    from .ddp import DDPStrategy as DDPStrategy
    from .deepspeed.strategy import DeepSpeedStrategy as DeepSpeedStrategy
    from .distributed import DistributedStrategy as DistributedStrategy
    from .fsdp.strategy import FSDPStrategy as FSDPStrategy
    from .model_parallel.strategy import ModelParallelStrategy as ModelParallelStrategy
    from .precision import MixedPrecision as MixedPrecision
    from .precision import Precision as Precision
    from .precision import TruePrecision as TruePrecision

__all__ = [
    "DDPStrategy",
    "DeepSpeedStrategy",
    "DistributedStrategy",
    "FSDPStrategy",
    "MixedPrecision",
    "ModelParallelStrategy",
    "Precision",
    "SingleDevice",
    "Strategy",
    "TruePrecision",
    "choose_strategy",
]

_FILE_OF = {
    "DDPStrategy": "ddp",
    "DeepSpeedStrategy": "deepspeed.strategy",
    "DistributedStrategy": "distributed",
    "FSDPStrategy": "fsdp.strategy",
    "MixedPrecision": "precision",
    "ModelParallelStrategy": "model_parallel.strategy",
    "Precision": "precision",
    "SingleDevice": "base",
    "Strategy": "base",
    "TruePrecision": "precision",
    "choose_strategy": "choose",
}


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_FILE_OF[name]}", __name__), name)
    return value
