"""Functions of ``accelerate`` that save and load sharded models and optimizers.

The files contain whole states, even if the plugin asks for shards, so that any number of processes can read them. To
save shards, use ``accelerator.save_state()``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...accelerator import accelerator as own
from ...accelerator.model_weights import save_object
from ...accelerator.optimizers import AcceleratedOptimizer
from .probes import is_peft_model


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: own.Accelerator,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
) -> None:
    """Write a prepared model's weights to ``pytorch_model_fsdp.bin``. Every process must call this."""
    _refuse_adapters(model, adapter_only)
    _write(accelerator, accelerator.get_state_dict(model), _path(output_dir, "pytorch_model_fsdp", model_index))


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: own.Accelerator,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
) -> Any:
    """Load the file of :func:`save_fsdp_model`; returns the keys that do not match. Every process must call this."""
    _refuse_adapters(model, adapter_only)
    placement = accelerator.prepared.placement(model, "load_fsdp_model")
    state = _read(_path(input_dir, "pytorch_model_fsdp", model_index))
    return placement.strategy.load_model_state(placement.module, state)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: own.Accelerator,
    optimizer: AcceleratedOptimizer,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
) -> None:
    """Write a prepared optimizer's state to ``optimizer.bin``. Every process must call this."""
    module = accelerator.prepared.placement(model, "save_fsdp_optimizer").module
    state = optimizer.strategy.optimizer_state(module, optimizer.optimizer)
    _write(accelerator, state, _path(output_dir, "optimizer", optimizer_index))


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: own.Accelerator,
    optimizer: AcceleratedOptimizer,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
) -> None:
    """Load the file of :func:`save_fsdp_optimizer`. Every process must call this."""
    module = accelerator.prepared.placement(model, "load_fsdp_optimizer").module
    state = _read(_path(input_dir, "optimizer", optimizer_index))
    optimizer.strategy.load_optimizer_state(module, optimizer.optimizer, state)


def _refuse_adapters(model: nn.Module, adapter_only: bool) -> None:
    if adapter_only and is_peft_model(model):
        raise NotImplementedError(
            f"{type(model).__name__} with adapter_only=True: sharded models are saved whole. Omit adapter_only, or "
            "call accelerator.save_state(only_trainable=True)."
        )


def _path(folder: str | os.PathLike[str], name: str, index: int) -> Path:
    return Path(folder) / f"{name}{f'_{index}' if index else ''}.bin"


def _write(accelerator: own.Accelerator, state: dict[str, Any], path: Path) -> None:
    """Write the file on the main process and wait for it on the others. It appears complete or not at all."""
    if accelerator.is_main_process:
        save_object(state, path, False)
    accelerator.wait_for_everyone()


def _read(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)
