"""Paceline trains PyTorch models: subclass :class:`TrainingModule`, and pass an instance to a :class:`Trainer`.

To write your own training loop, use :class:`Accelerator`.

Public names are loaded on first use, so ``import paceline`` is fast and does not import torch.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from .lazy_names import lazy_names
from .old_paths import OldPaths

if TYPE_CHECKING:
    from . import callbacks as callbacks
    from . import loggers as loggers
    from . import profilers as profilers
    from . import strategies as strategies
    from .accelerator.accelerator import Accelerator as Accelerator
    from .accelerator.enums import DDPCommunicationHookType as DDPCommunicationHookType
    from .accelerator.enums import DistributedType as DistributedType
    from .accelerator.enums import DynamoBackend as DynamoBackend
    from .accelerator.kwargs_handlers import AutocastKwargs as AutocastKwargs
    from .accelerator.kwargs_handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from .accelerator.kwargs_handlers import GradScalerKwargs as GradScalerKwargs
    from .accelerator.kwargs_handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
    from .accelerator.kwargs_handlers import ProfileKwargs as ProfileKwargs
    from .accelerator.launchers import debug_launcher as debug_launcher
    from .accelerator.launchers import notebook_launcher as notebook_launcher
    from .accelerator.loaders import DataLoaderConfiguration as DataLoaderConfiguration
    from .accelerator.loaders import skip_first_batches as skip_first_batches
    from .accelerator.local_sgd import LocalSGD as LocalSGD
    from .accelerator.logging import get_logger as get_logger
    from .accelerator.parallelism_config import ParallelismConfig as ParallelismConfig
    from .accelerator.plugins import DeepSpeedPlugin as DeepSpeedPlugin
    from .accelerator.plugins import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from .accelerator.plugins import GradientAccumulationPlugin as GradientAccumulationPlugin
    from .accelerator.plugins import ProjectConfiguration as ProjectConfiguration
    from .accelerator.plugins import TorchDynamoPlugin as TorchDynamoPlugin
    from .accelerator.process_state import PartialState as PartialState
    from .accelerator.quantization import BnbQuantizationConfig as BnbQuantizationConfig
    from .accelerator.quantization import load_and_quantize_model as load_and_quantize_model
    from .accelerator.random_seeds import set_seed as set_seed
    from .accelerator.random_seeds import synchronize_rng_states as synchronize_rng_states
    from .big_model.dispatch import cpu_offload as cpu_offload
    from .big_model.dispatch import cpu_offload_with_hook as cpu_offload_with_hook
    from .big_model.dispatch import disk_offload as disk_offload
    from .big_model.dispatch import dispatch_model as dispatch_model
    from .big_model.empty_init import init_empty_weights as init_empty_weights
    from .big_model.empty_init import init_on_device as init_on_device
    from .big_model.infer_device_map import infer_auto_device_map as infer_auto_device_map
    from .big_model.infer_device_map import plan_device_map as plan_device_map
    from .big_model.loading import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from .big_model.loading import load_checkpoint_in_model as load_checkpoint_in_model
    from .big_model.module_sizes import compute_module_sizes as compute_module_sizes
    from .callbacks.base import Callback as Callback
    from .data.combined_loader import CombinedLoader as CombinedLoader
    from .data.datamodule import DataModule as DataModule
    from .memory.out_of_memory_retry import find_executable_batch_size as find_executable_batch_size
    from .processes.seed import seed_everything as seed_everything
    from .trainer.module import TrainingModule as TrainingModule
    from .trainer.trainer import Trainer as Trainer
    from .trainer.verify import verify as verify
    from .tuner.tuner import Tuner as Tuner

__version__ = "0.1.0"

sys.meta_path.insert(0, OldPaths())
lazy_names(
    globals(),
    {
        "accelerator.accelerator": "Accelerator",
        "accelerator.enums": "DDPCommunicationHookType DistributedType DynamoBackend",
        "accelerator.kwargs_handlers": "AutocastKwargs DistributedDataParallelKwargs GradScalerKwargs "
        "InitProcessGroupKwargs ProfileKwargs",
        "accelerator.launchers": "debug_launcher notebook_launcher",
        "accelerator.loaders": "DataLoaderConfiguration skip_first_batches",
        "accelerator.local_sgd": "LocalSGD",
        "accelerator.logging": "get_logger",
        "accelerator.parallelism_config": "ParallelismConfig",
        "accelerator.plugins": "DeepSpeedPlugin FullyShardedDataParallelPlugin GradientAccumulationPlugin "
        "ProjectConfiguration TorchDynamoPlugin",
        "accelerator.process_state": "PartialState",
        "accelerator.quantization": "BnbQuantizationConfig load_and_quantize_model",
        "accelerator.random_seeds": "set_seed synchronize_rng_states",
        "big_model.dispatch": "cpu_offload cpu_offload_with_hook disk_offload dispatch_model",
        "big_model.empty_init": "init_empty_weights init_on_device",
        "big_model.infer_device_map": "infer_auto_device_map plan_device_map",
        "big_model.loading": "load_checkpoint_and_dispatch load_checkpoint_in_model",
        "big_model.module_sizes": "compute_module_sizes",
        "callbacks.base": "Callback",
        "data.combined_loader": "CombinedLoader",
        "data.datamodule": "DataModule",
        "memory.out_of_memory_retry": "find_executable_batch_size",
        "processes.seed": "seed_everything",
        "trainer.module": "TrainingModule",
        "trainer.trainer": "Trainer",
        "trainer.verify": "verify",
        "tuner.tuner": "Tuner",
    },
    own="__version__ callbacks loggers profilers strategies",
    modules="callbacks loggers profilers strategies trainer",
)
if os.environ.get("PACELINE_STANDS_IN"):
    from .compat import install_from_environment

    install_from_environment()
