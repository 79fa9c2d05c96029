"""``accelerate``'s functions for modules, weights, and the files of sharded models.

These files contain full state dicts even if the plugin requests sharded ones, so any number of processes can read
them. To save shards, use ``accelerator.save_state()``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ... import messages
from ...accelerator import accelerator as own
from ...accelerator.model_weights import save_object
from ...accelerator.optimizers import AcceleratedOptimizer
from ...strategies.compile_networks import compile_one, compile_repeated
from ...torch_private import compiler_of, is_compiled
from .probes import is_peft_model


class NoSync:
    """The ``no_sync`` method of a prepared model, like DistributedDataParallel's.

    Only models whose gradients are averaged have this method. In copies of the model, which are not prepared, the
    method does nothing.

    Args:
        accelerator: the Accelerator that prepared the model.
        model: the prepared model.
    """

    def __init__(self, accelerator: own.Accelerator, model: nn.Module) -> None:
        self._accelerator = weakref.ref(accelerator)
        self._model = weakref.ref(model)

    def __call__(self) -> AbstractContextManager[None]:
        """Return a context manager that turns off gradient synchronization; see ``Accelerator.no_sync``."""
        accelerator, model = self._accelerator(), self._model()
        return nullcontext() if accelerator is None or model is None else accelerator.no_sync(model)

    def __reduce__(self) -> Any:
        return partial, (nullcontext,)


def is_compiled_module(module: Any) -> bool:
    """Return True if a module is wrapped by ``torch.compile``."""
    return compiler_of(module) is not None


def has_compiled_regions(module: Any) -> bool:
    """Return True if any submodule of a module is compiled."""
    inside = list(module.modules())[1:] if isinstance(module, nn.Module) else []
    return any(compiler_of(one) is not None or is_compiled(one) for one in inside)


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile a module's repeated blocks, or the entire module if it has no repeated blocks; return the module."""
    if not compile_repeated(module, compile_kwargs):
        compile_one(module, compile_kwargs)
    return module


def model_has_dtensor(model: nn.Module) -> bool:
    """Return True if any parameter is a DTensor."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return all modules of a model, each after its submodules."""
    found = [*_below(model, ""), ("", model)]
    return found if return_fqns else [module for _, module in found]


def _below(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        full = f"{prefix}.{name}" if prefix else name
        found += [*_below(child, full), (full, child)]
    return found


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``state_dict`` in which each tensor is contiguous and has only one name, as safetensors requires."""
    seen: set[tuple[Any, ...]] = set()
    kept: dict[str, Any] = {}
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            place = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
            if value.numel() and value.device.type != "meta" and place in seen:
                continue
            seen.add(place)
            value = value.contiguous()
        kept[name] = value
    return kept


# ---- files of sharded models -----------------------------------------------------------------------------------------


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: own.Accelerator,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write a prepared model's weights to ``pytorch_model_fsdp.bin``. Every process must call this."""
    _refuse_adapters(model, adapter_only)
    _tell_whole("save_fsdp_model", fsdp_plugin, use_dcp)
    _write(accelerator, accelerator.get_state_dict(model), _path(output_dir, "pytorch_model_fsdp", model_index))


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: own.Accelerator,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Load a file written by :func:`save_fsdp_model`; return keys that do not match. Every process must call this."""
    _refuse_adapters(model, adapter_only)
    _tell_whole("load_fsdp_model", None, use_dcp)
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
    use_dcp: bool = True,
) -> None:
    """Write a prepared optimizer's state to ``optimizer.bin``. Every process must call this."""
    _tell_whole("save_fsdp_optimizer", fsdp_plugin, use_dcp)
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
    use_dcp: bool = True,
) -> None:
    """Load a file written by :func:`save_fsdp_optimizer`. Every process must call this."""
    _refuse_adapters(model, adapter_only)
    _tell_whole("load_fsdp_optimizer", None, use_dcp)
    module = accelerator.prepared.placement(model, "load_fsdp_optimizer").module
    state = _read(_path(input_dir, "optimizer", optimizer_index))
    optimizer.strategy.load_optimizer_state(module, optimizer.optimizer, state)


def fsdp2_prepare_model(accelerator: own.Accelerator, model: nn.Module) -> nn.Module:
    """Shard a model that no optimizer trains, such as a reference model. Saved states do not contain it."""
    found = accelerator.prepare_model(model, evaluation_mode=True)
    accelerator.prepared.unsaved.add(id(found))
    return found


def _refuse_adapters(model: nn.Module, adapter_only: bool) -> None:
    if adapter_only and is_peft_model(model):
        raise NotImplementedError(
            f"adapter_only=True is not supported for {type(model).__name__}, because sharded models are saved in full. "
            "Leave out adapter_only, or call accelerator.save_state(only_trainable=True)."
        )


def _tell_whole(where: str, fsdp_plugin: Any, use_dcp: bool) -> None:
    asked = str(getattr(fsdp_plugin, "state_dict_type", None))
    messages.ignored(
        where,
        "these files always contain the full state, whereas accelerator.save_state() can save shards",
        unless=True,
        state_dict_type=asked if "SHARDED" in asked.upper() else None,
        use_dcp=use_dcp,
    )


def _path(folder: str | os.PathLike[str], name: str, index: int) -> Path:
    return Path(folder) / f"{name}{f'_{index}' if index else ''}.bin"


def _write(accelerator: own.Accelerator, state: dict[str, Any], path: Path) -> None:
    """Write a file atomically on the main process while the other processes wait."""
    if accelerator.is_main_process:
        save_object(state, path, False)
    accelerator.wait_for_everyone()


def _read(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)
