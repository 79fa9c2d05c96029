"""Paceline trains PyTorch models: subclass :class:`TrainingModule` and pass it to a :class:`Trainer`.

To write your own loop, use :class:`Accelerator`.

Every public name is loaded when it is first used, so ``import paceline`` is almost free (it does not import torch).
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from .old_paths import OldPaths

if TYPE_CHECKING:
    from . import callbacks, loggers, profilers, strategies
    from .accelerator.accelerator import Accelerator
    from .accelerator.enums import DDPCommunicationHookType, DistributedType, DynamoBackend
    from .accelerator.kwargs_handlers import (
        AutocastKwargs,
        DistributedDataParallelKwargs,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
    )
    from .accelerator.launchers import debug_launcher, notebook_launcher
    from .accelerator.loaders import DataLoaderConfiguration, skip_first_batches
    from .accelerator.local_sgd import LocalSGD
    from .accelerator.logging import get_logger
    from .accelerator.parallelism_config import ParallelismConfig
    from .accelerator.plugins import (
        DeepSpeedPlugin,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        ProjectConfiguration,
        TorchDynamoPlugin,
    )
    from .accelerator.process_state import PartialState
    from .accelerator.random_seeds import set_seed, synchronize_rng_states
    from .big_model.dispatch import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
    from .big_model.empty_init import init_empty_weights, init_on_device
    from .big_model.infer_device_map import infer_auto_device_map, plan_device_map
    from .big_model.loading import load_checkpoint_and_dispatch, load_checkpoint_in_model
    from .big_model.module_sizes import compute_module_sizes
    from .callbacks.base import Callback
    from .data.combined_loader import CombinedLoader
    from .data.datamodule import DataModule
    from .memory.out_of_memory_retry import find_executable_batch_size
    from .processes.seed import seed_everything
    from .trainer.module import TrainingModule
    from .trainer.trainer import Trainer
    from .trainer.verify import verify
    from .tuner.tuner import Tuner

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

_MODULE_OF = {
    "Accelerator": ".accelerator.accelerator",
    "AutocastKwargs": ".accelerator.kwargs_handlers",
    "Callback": ".callbacks.base",
    "CombinedLoader": ".data.combined_loader",
    "DDPCommunicationHookType": ".accelerator.enums",
    "DataLoaderConfiguration": ".accelerator.loaders",
    "DataModule": ".data.datamodule",
    "DeepSpeedPlugin": ".accelerator.plugins",
    "DistributedDataParallelKwargs": ".accelerator.kwargs_handlers",
    "DistributedType": ".accelerator.enums",
    "DynamoBackend": ".accelerator.enums",
    "FullyShardedDataParallelPlugin": ".accelerator.plugins",
    "GradScalerKwargs": ".accelerator.kwargs_handlers",
    "GradientAccumulationPlugin": ".accelerator.plugins",
    "InitProcessGroupKwargs": ".accelerator.kwargs_handlers",
    "LocalSGD": ".accelerator.local_sgd",
    "ParallelismConfig": ".accelerator.parallelism_config",
    "PartialState": ".accelerator.process_state",
    "ProfileKwargs": ".accelerator.kwargs_handlers",
    "ProjectConfiguration": ".accelerator.plugins",
    "TorchDynamoPlugin": ".accelerator.plugins",
    "Trainer": ".trainer.trainer",
    "TrainingModule": ".trainer.module",
    "Tuner": ".tuner.tuner",
    "compute_module_sizes": ".big_model.module_sizes",
    "cpu_offload": ".big_model.dispatch",
    "cpu_offload_with_hook": ".big_model.dispatch",
    "debug_launcher": ".accelerator.launchers",
    "disk_offload": ".big_model.dispatch",
    "dispatch_model": ".big_model.dispatch",
    "find_executable_batch_size": ".memory.out_of_memory_retry",
    "get_logger": ".accelerator.logging",
    "infer_auto_device_map": ".big_model.infer_device_map",
    "init_empty_weights": ".big_model.empty_init",
    "init_on_device": ".big_model.empty_init",
    "load_checkpoint_and_dispatch": ".big_model.loading",
    "load_checkpoint_in_model": ".big_model.loading",
    "notebook_launcher": ".accelerator.launchers",
    "plan_device_map": ".big_model.infer_device_map",
    "seed_everything": ".processes.seed",
    "set_seed": ".accelerator.random_seeds",
    "skip_first_batches": ".accelerator.loaders",
    "synchronize_rng_states": ".accelerator.random_seeds",
    "verify": ".trainer.verify",
}
_ROOMS = ("callbacks", "loggers", "profilers", "strategies", "trainer")

sys.meta_path.insert(0, OldPaths())
if os.environ.get("PACELINE_STANDS_IN"):
    from .compat import install_from_environment

    install_from_environment()


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f".{name}", __name__)
    if name not in _MODULE_OF:
        from .messages import did_you_mean

        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{did_you_mean(name, __all__)}")
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
