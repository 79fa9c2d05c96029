"""Create models whose tensors have shapes but no values."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ..torch_private import own_buffers, own_parameters


def init_empty_weights(include_buffers: bool | None = None) -> AbstractContextManager[None]:
    """Context manager in which new parameters are moved to the meta device, which keeps only their shapes and dtypes.

    A parameter has memory only until its module registers it, and no time is spent on its initial values.

    Args:
        include_buffers: whether to create buffers on the meta device too; None uses the environment variable
            ACCELERATE_INIT_INCLUDE_BUFFERS, or else False. Computed buffers need values, because no file contains them.

    Example:
        >>> with init_empty_weights():
        ...     model = nn.Linear(10_000, 10_000)
        >>> model.weight.is_meta
        True
    """
    return init_on_device(torch.device("meta"), include_buffers)


@contextmanager
def init_on_device(device: Any, include_buffers: bool | None = None) -> Iterator[None]:
    """Context manager in which new parameters are placed on a device.

    ``include_buffers`` is the same as for :func:`init_empty_weights`.
    """
    if include_buffers is None:
        include_buffers = os.environ.get("ACCELERATE_INIT_INCLUDE_BUFFERS", "").lower() in ("1", "true", "yes")
    if include_buffers:
        with torch.device(device):
            yield
        return
    register = nn.Module.register_parameter
    made = WeakIdKeyDictionary()  # so that a parameter in several modules stays a single object

    def place(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or is_lazy(param):
            return
        values = param.detach().to(device)
        if values.device != param.device:
            own_parameters(module)[name] = made.setdefault(param, like(param, values))

    nn.Module.register_parameter = place  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Return a copy of a parameter with new values; all other properties stay the same."""
    made = nn.Parameter(values, requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made


def put(model: nn.Module, names: Iterable[str], tensor: Tensor) -> None:
    """Set a tensor as a model's parameter (or buffer) under each of the given names."""
    for name in names:
        place, _, last = name.rpartition(".")
        part = model.get_submodule(place)
        held: dict[str, Any] = own_parameters(part) if last in own_parameters(part) else own_buffers(part)
        held[last] = tensor


def give(model: nn.Module, names: Iterable[str], old: Tensor, values: Tensor) -> None:
    """Set a tensor's values. A tensor on the meta device is replaced with a new object under all its names."""
    if old.is_meta:
        put(model, names, like(old, values) if isinstance(old, nn.Parameter) else values)
    else:
        old.data = values


class no_initial_values(TorchFunctionMode):  # noqa: N801 - a context
    """Context manager in which the functions of ``torch.nn.init`` leave tensors unchanged."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) != "torch.nn.init":
            return func(*args, **kwargs)
        return kwargs["tensor"] if "tensor" in kwargs else args[0]
