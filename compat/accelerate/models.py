"""Functions of ``accelerate`` for modules and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...accelerator.models import restore, unwrapped
from ...strategies.compile_networks import compile_one, compile_repeated
from ...torch_private import compiler_of, inside_compiled, is_compiled


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """The module without its wrappers, like ``accelerator.unwrap_model``."""
    found = unwrapped(model)
    if recursive and isinstance(found, nn.Module):
        for name, child in list(found.named_children()):
            setattr(found, name, extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, True))
    if not keep_fp32_wrapper and isinstance(found, nn.Module):
        restore(found)
    return model if keep_torch_compile and compiler_of(model) is not None and inside_compiled(model) is found else found


def is_compiled_module(module: Any) -> bool:
    """Whether a module is wrapped by ``torch.compile``."""
    return compiler_of(module) is not None


def has_compiled_regions(module: Any) -> bool:
    """Whether submodules of a module are compiled."""
    inside = list(module.modules())[1:] if isinstance(module, nn.Module) else []
    return any(compiler_of(one) is not None or is_compiled(one) for one in inside)


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile a module's repeated blocks, or all of it if there are none. Returns the same object."""
    if not compile_repeated(module, compile_kwargs):
        compile_one(module, compile_kwargs)
    return module


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether a parameter is a DTensor."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """All modules of a model, each after its submodules."""
    found = [*_below(model, ""), ("", model)]
    return found if return_fqns else [module for _, module in found]


def _below(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        full = f"{prefix}.{name}" if prefix else name
        found += [*_below(child, full), (full, child)]
    return found


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a ``state_dict``, each tensor contiguous and under a single name, as safetensors requires."""
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
