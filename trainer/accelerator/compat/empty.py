"""Models that are made without weights, and filled from a file one tensor at a time, as diffusers loads them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def init_empty_weights(include_buffers: bool | None = None) -> AbstractContextManager[None]:
    """Within, modules are made with parameters that have shapes and no values, on the meta device.

    Args:
        include_buffers: buffers too; None: by ACCELERATE_INIT_INCLUDE_BUFFERS, else no.
    """
    return init_on_device(torch.device("meta"), include_buffers)


@contextmanager
def init_on_device(device: Any, include_buffers: bool | None = None) -> Iterator[None]:
    """Within, modules are made with their parameters on a device.

    Args:
        device: where.
        include_buffers: buffers too; None: by ACCELERATE_INIT_INCLUDE_BUFFERS, else no: they may be computed, and then
            no file has them.
    """
    if include_buffers is None:
        include_buffers = os.environ.get("ACCELERATE_INIT_INCLUDE_BUFFERS", "").lower() in ("1", "true", "yes")
    if include_buffers:
        with torch.device(device):
            yield
        return
    register = nn.Module.register_parameter

    def place(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and param.device.type != torch.device(device).type:  # one that is tied stays one
            module._parameters[name] = _like(param, param.detach().to(device))

    nn.Module.register_parameter = place  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Any,
    value: Tensor | None = None,
    dtype: torch.dtype | None = None,
    **more: Any,
) -> None:
    """Give a module a parameter or buffer on a device.

    Args:
        module: the module, or one that it is in.
        tensor_name: its name, dotted.
        device: where to.
        value: what it is to be; None: what it is.
        dtype: None: that which it has.
        **more: accepted: ``tied_params_map``, ``non_blocking``, ``clear_cache``.

    Raises:
        ValueError: there is none of that name, it has another shape, or it has no value yet and is given none.
    """
    if more.get("fp16_statistics") is not None:
        raise NotImplementedError("set_module_tensor_to_device(fp16_statistics=...): Paceline has no 8-bit weights.")
    place, _, name = tensor_name.rpartition(".")
    owner = module.get_submodule(place)
    held: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
    old = held.get(name)
    if old is None:
        raise ValueError(f"{type(owner).__name__} has no parameter and no buffer {name!r} (of {tensor_name!r}).")
    if value is None and old.device.type == "meta" and torch.device(device).type != "meta":
        raise ValueError(f"{tensor_name} has a shape and no value yet, so it cannot be moved to {device}. Pass value=.")
    if value is not None and value.shape != old.shape:
        raise ValueError(f"{tensor_name} has shape {tuple(old.shape)}, but the value has {tuple(value.shape)}.")
    new = (old if value is None else value).detach().to(device, dtype or old.dtype)
    held[name] = _like(old, new) if isinstance(old, nn.Parameter) else new


def _like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """A parameter of other values that is the same in everything else."""
    made = nn.Parameter(values, requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made
