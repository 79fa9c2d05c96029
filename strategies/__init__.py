"""Strategies, which decide where tensors live and how processes communicate. Classes are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .base import SingleDevice as SingleDevice
    from .base import Strategy as Strategy
    from .choose import choose_strategy as choose_strategy
    from .ddp import DDPStrategy as DDPStrategy
    from .deepspeed.strategy import DeepSpeedStrategy as DeepSpeedStrategy
    from .distributed import DistributedStrategy as DistributedStrategy
    from .fsdp.strategy import FSDPStrategy as FSDPStrategy
    from .model_parallel.strategy import ModelParallelStrategy as ModelParallelStrategy
    from .precision import BitsandbytesPrecision as BitsandbytesPrecision
    from .precision import Float8Precision as Float8Precision
    from .precision import MixedPrecision as MixedPrecision
    from .precision import Precision as Precision
    from .precision import TransformerEnginePrecision as TransformerEnginePrecision
    from .precision import TruePrecision as TruePrecision

lazy_names(
    globals(),
    {
        "base": "SingleDevice Strategy",
        "choose": "choose_strategy",
        "ddp": "DDPStrategy",
        "deepspeed.strategy": "DeepSpeedStrategy",
        "distributed": "DistributedStrategy",
        "fsdp.strategy": "FSDPStrategy",
        "model_parallel.strategy": "ModelParallelStrategy",
        "precision": (
            "BitsandbytesPrecision Float8Precision MixedPrecision Precision TransformerEnginePrecision TruePrecision"
        ),
    },
)
