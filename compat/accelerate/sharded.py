"""Functions of ``accelerate`` that write and read models and optimizers whose parameters are sharded.

Files hold whole states, also where the plugin asks for parts, so that any number of processes can read them; the parts
of an Accelerator's own checkpoints are written by ``accelerator.save_state()``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...accelerator import accelerator as own
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
    """Write a prepared model's weights to ``pytorch_model_fsdp.bin``; every process must call."""
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
    """Read what :func:`save_fsdp_model` wrote; returns the keys that did not fit. Every process must call."""
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
    """Write a prepared optimizer's state to ``optimizer.bin``; every process must call."""
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
    """Read what :func:`save_fsdp_optimizer` wrote; every process must call."""
    module = accelerator.prepared.placement(model, "load_fsdp_optimizer").module
    state = _read(_path(input_dir, "optimizer", optimizer_index))
    optimizer.strategy.load_optimizer_state(module, optimizer.optimizer, state)


def _refuse_adapters(model: nn.Module, adapter_only: bool) -> None:
    if adapter_only and is_peft_model(model):
        raise NotImplementedError(
            f"{type(model).__name__} with adapter_only=True: sharded models are saved whole. Leave it out, or call "
            "accelerator.save_state(only_trainable=True)."
        )


def _path(folder: str | os.PathLike[str], name: str, index: int) -> Path:
    return Path(folder) / f"{name}{f'_{index}' if index else ''}.bin"


def _write(accelerator: own.Accelerator, state: dict[str, Any], path: Path) -> None:
    """Write on the main process; the file appears whole, and is there for all afterwards."""
    if accelerator.is_main_process:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        torch.save(state, draft)
        draft.replace(path)
    accelerator.wait_for_everyone()


def _read(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)
