"""Paceline trains PyTorch models: subclass :class:`TrainingModule`, hand it to a :class:`Trainer`.

For a loop of your own there is :class:`Accelerator`.

Every public name is loaded when it is first used, so ``import paceline`` costs next to nothing (not even torch).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import callbacks, loggers, profilers, strategies
    from .callbacks.base import Callback
    from .strategies.big_model.dispatch import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
    from .strategies.big_model.empty import init_empty_weights, init_on_device
    from .strategies.big_model.loading import load_checkpoint_and_dispatch, load_checkpoint_in_model
    from .strategies.big_model.placement import infer_auto_device_map, plan_device_map
    from .strategies.big_model.sizes import compute_module_sizes
    from .trainer.accelerator.accelerator import Accelerator
    from .trainer.accelerator.enums import DDPCommunicationHookType, DistributedType, DynamoBackend
    from .trainer.accelerator.fsdp_plugin import FullyShardedDataParallelPlugin
    from .trainer.accelerator.handlers import (
        AutocastKwargs,
        DistributedDataParallelKwargs,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
    )
    from .trainer.accelerator.launchers import debug_launcher, notebook_launcher
    from .trainer.accelerator.loaders import DataLoaderConfiguration, skip_first_batches
    from .trainer.accelerator.local_sgd import LocalSGD
    from .trainer.accelerator.logging import get_logger
    from .trainer.accelerator.parallelism import ParallelismConfig
    from .trainer.accelerator.plugins import (
        DeepSpeedPlugin,
        GradientAccumulationPlugin,
        ProjectConfiguration,
        TorchDynamoPlugin,
    )
    from .trainer.accelerator.process_state import PartialState
    from .trainer.accelerator.randomness import set_seed, synchronize_rng_states
    from .trainer.data.combined import CombinedLoader
    from .trainer.data.datamodule import DataModule
    from .trainer.memory import find_executable_batch_size
    from .trainer.module import TrainingModule
    from .trainer.seed import seed_everything
    from .trainer.trainer import Trainer
    from .trainer.tuner.tuner import Tuner
    from .trainer.verify import verify

__version__ = "0.1.0"

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "Callback",
    "CombinedLoader",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DataModule",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "LocalSGD",
    "ParallelismConfig",
    "PartialState",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
    "Trainer",
    "TrainingModule",
    "Tuner",
    "__version__",
    "callbacks",
    "compute_module_sizes",
    "cpu_offload",
    "cpu_offload_with_hook",
    "debug_launcher",
    "disk_offload",
    "dispatch_model",
    "find_executable_batch_size",
    "get_logger",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "loggers",
    "notebook_launcher",
    "plan_device_map",
    "profilers",
    "seed_everything",
    "set_seed",
    "skip_first_batches",
    "strategies",
    "synchronize_rng_states",
    "verify",
]

_HOME = {
    "Accelerator": ".trainer.accelerator.accelerator",
    "AutocastKwargs": ".trainer.accelerator.handlers",
    "Callback": ".callbacks.base",
    "CombinedLoader": ".trainer.data.combined",
    "DDPCommunicationHookType": ".trainer.accelerator.enums",
    "DataLoaderConfiguration": ".trainer.accelerator.loaders",
    "DataModule": ".trainer.data.datamodule",
    "DeepSpeedPlugin": ".trainer.accelerator.plugins",
    "DistributedDataParallelKwargs": ".trainer.accelerator.handlers",
    "DistributedType": ".trainer.accelerator.enums",
    "DynamoBackend": ".trainer.accelerator.enums",
    "FullyShardedDataParallelPlugin": ".trainer.accelerator.fsdp_plugin",
    "GradScalerKwargs": ".trainer.accelerator.handlers",
    "GradientAccumulationPlugin": ".trainer.accelerator.plugins",
    "InitProcessGroupKwargs": ".trainer.accelerator.handlers",
    "LocalSGD": ".trainer.accelerator.local_sgd",
    "ParallelismConfig": ".trainer.accelerator.parallelism",
    "PartialState": ".trainer.accelerator.process_state",
    "ProfileKwargs": ".trainer.accelerator.handlers",
    "ProjectConfiguration": ".trainer.accelerator.plugins",
    "TorchDynamoPlugin": ".trainer.accelerator.plugins",
    "Trainer": ".trainer.trainer",
    "TrainingModule": ".trainer.module",
    "Tuner": ".trainer.tuner.tuner",
    "compute_module_sizes": ".strategies.big_model.sizes",
    "cpu_offload": ".strategies.big_model.dispatch",
    "cpu_offload_with_hook": ".strategies.big_model.dispatch",
    "debug_launcher": ".trainer.accelerator.launchers",
    "disk_offload": ".strategies.big_model.dispatch",
    "dispatch_model": ".strategies.big_model.dispatch",
    "find_executable_batch_size": ".trainer.memory",
    "get_logger": ".trainer.accelerator.logging",
    "infer_auto_device_map": ".strategies.big_model.placement",
    "init_empty_weights": ".strategies.big_model.empty",
    "init_on_device": ".strategies.big_model.empty",
    "load_checkpoint_and_dispatch": ".strategies.big_model.loading",
    "load_checkpoint_in_model": ".strategies.big_model.loading",
    "notebook_launcher": ".trainer.accelerator.launchers",
    "plan_device_map": ".strategies.big_model.placement",
    "seed_everything": ".trainer.seed",
    "set_seed": ".trainer.accelerator.randomness",
    "skip_first_batches": ".trainer.accelerator.loaders",
    "synchronize_rng_states": ".trainer.accelerator.randomness",
    "verify": ".trainer.verify",
}
_ROOMS = ("callbacks", "loggers", "profilers", "strategies", "trainer")


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
