"""Hooks that run before and after a module's ``forward``, to move inputs and load offloaded weights.

The names and attributes match those of Accelerate's hooks (``module._hf_hook``, ``module._old_forward``), because
libraries in the transformers and diffusers ecosystem use them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..devices.kinds import present
from ..processes.device_transfer import convert, move
from ..torch_private import APPLY, own_buffers, own_parameters
from .device_map import torch_device
from .empty_init import give
from .module_sizes import named_tensors, names_of
from .prefetch import Fetcher, Part

_NOTHING = nullcontext()


class ModelHook:
    """A hook around a module's ``forward``; :func:`add_hook_to_module` attaches it."""

    #: Whether the forward runs under ``torch.no_grad()``.
    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is attached; prepares and returns the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before ``forward``; returns the arguments for ``forward``."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after ``forward``; returns the output to use."""
        return output

    def failed(self, module: nn.Module) -> None:
        """Called instead of :meth:`post_forward` if ``forward`` fails; not called if :meth:`pre_forward` fails."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is removed; reverts its changes to the module and returns the module."""
        return module


class SequentialHook(ModelHook):
    """Runs several hooks in the given order, both before and after ``forward``."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks
        self.no_grad = any(hook.no_grad for hook in hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for index, hook in enumerate(self.hooks):
            try:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
            except BaseException:
                SequentialHook(*self.hooks[:index]).failed(module)
                raise
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for index, hook in enumerate(self.hooks):
            try:
                output = hook.post_forward(module, output)
            except BaseException:
                SequentialHook(*self.hooks[index + 1 :]).failed(module)
                raise
        return output

    def failed(self, module: nn.Module) -> None:
        for hook in self.hooks:
            hook.failed(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Attach a hook to the ``forward`` of a module instance, and return the module.

    With ``append``, the hook runs after the module's existing hook instead of replacing it.
    """
    before = vars(module).get("_hf_hook")
    if before is not None and not append:
        remove_hook_from_module(module)
    old = vars(module).get("_old_forward", module.forward)
    module = hook.init_hook(module)
    vars(module).update(_hf_hook=SequentialHook(before, hook) if before is not None and append else hook)
    vars(module).update(_old_forward=old)
    module.forward = functools.update_wrapper(functools.partial(_run, module), old)  # deep copies run the copied module
    return module


def _run(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run a module's ``forward`` with its hook."""
    hook: ModelHook = module._hf_hook
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    try:
        with torch.no_grad() if hook.no_grad else _NOTHING:
            output = module._old_forward(*args, **kwargs)
    except BaseException:
        hook.failed(module)
        raise
    return hook.post_forward(module, output)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove a module's hook, restore the module's own ``forward``, and return the module.

    With ``recurse``, the hooks of all submodules are removed too.
    """
    hook = vars(module).pop("_hf_hook", None)
    if hook is not None:
        hook.detach_hook(module)
        old = vars(module).pop("_old_forward")
        vars(module).pop("forward", None)
        if getattr(old, "__func__", None) is not type(module).forward:  # the user had already replaced it
            vars(module)["forward"] = old
    for child in module.children() if recurse else ():
        remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and all its submodules, so that the module can be moved again."""
    remove_hook_from_module(module, recurse=True)
    for part in module.modules():
        vars(part).pop(APPLY, None)
    vars(module).pop("hf_device_map", None)


class AlignDevicesHook(ModelHook):
    """Moves inputs, and with ``offload`` also weights, to the device on which a module runs.

    Args:
        execution_device: device on which the module runs; None means its current device.
        offload: whether to offload the module's weights, to ``weights_map`` or to host memory.
        io_same_device: whether to move outputs to the device of the original inputs.
        weights_map: values of the weights by name, in host memory or mapped from a file.
        offload_buffers: whether to offload buffers too.
        place_submodules: whether to include all submodules instead of only the module's own tensors.
        skip_keys: keyword arguments that are not moved.
        tied_params_map: accepted and ignored, because tied parameters are a single object and so are moved together.
        part: the tensors that are fetched together with the module, if they are already known.
        fetcher: the entire model's fetcher, which starts and stops with the module's ``forward``.
    """

    def __init__(
        self,
        execution_device: Any = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Sequence[str] | None = None,
        tied_params_map: Any = None,
        part: Part | None = None,
        fetcher: Fetcher | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = [skip_keys] if isinstance(skip_keys, str) else list(skip_keys or ())
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.part = part
        self.fetcher = fetcher

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the tensors to the execution device or, with ``offload``, to host memory or their files."""
        if self.execution_device is None or self.part is not None or self.fetcher is not None:
            return module
        device = torch_device(self.execution_device, "execution_device")
        offloaded = list(named_tensors(module, self.place_submodules, self.offload_buffers)) if self.offload else []
        leaving = {id(tensor) for _, tensor in offloaded}
        for _, tensor in named_tensors(module, recurse=self.place_submodules):
            if id(tensor) not in leaving and not tensor.is_meta:
                tensor.data = tensor.data.to(device)
        if offloaded:
            self._offload(module, [name for name, _ in offloaded], device)
        return module

    def _offload(self, module: nn.Module, names: list[str], device: torch.device) -> None:
        weights = self.weights_map or {}
        for name in names:
            tensor = _tensor(module, name)
            home = weights[name] if name in weights else tensor.data.to("cpu")
            if home is not tensor.data and (tensor.is_meta or home.data_ptr() != tensor.data_ptr()):
                give(module, names_of(module)[id(tensor)], tensor, home)
        tensors = {id(tensor): tensor for tensor in (_tensor(module, name) for name in names)}
        self.part = Part(list(tensors.values()), device, Fetcher())

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copy offloaded weights and move inputs to the execution device."""
        if self.io_same_device:
            self.input_device = _device_in((args, kwargs))
        if self.execution_device is not None and str(self.execution_device) != "cpu":
            device = torch_device(self.execution_device, "execution_device")
            kwargs = {key: value if key in self.skip_keys else move(value, device) for key, value in kwargs.items()}
            args = move(args, device)
        if self.fetcher is not None:
            self.fetcher.start()
        try:
            if self.part is not None:
                self.part.enter()
        except BaseException:
            if self.fetcher is not None:
                self.fetcher.stop()
            raise
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Free copied weights; with ``io_same_device``, move outputs to the device of the original inputs."""
        self.failed(module)
        if self.io_same_device and self.input_device is not None:
            return move(output, self.input_device)
        return output

    def failed(self, module: nn.Module) -> None:
        if self.part is not None:
            self.part.leave()
        if self.fetcher is not None:
            self.fetcher.stop()

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Leave the weights on the device that stores them, and make them usable there without the hook."""
        if self.part is not None:
            self.part.release()
        return module


class CpuOffload(ModelHook):
    """Keeps an entire model in host memory until it runs, and then on the device until another model runs.

    Args:
        execution_device: device on which the model runs; None means the first accelerator, or else the CPU.
        prev_module_hook: hook of the model to move back to host memory when this model runs.
    """

    def __init__(self, execution_device: Any = None, prev_module_hook: UserCpuOffloadHook | None = None) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = default_device() if execution_device is None else execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the previous model to host memory and this model to the device."""
        device = torch_device(self.execution_device, "execution_device")
        tensor = next((tensor for _, tensor in named_tensors(module)), None)
        if tensor is not None and tensor.device != device:
            if self.prev_module_hook is not None:
                self.prev_module_hook.offload()
            module.to(device)
        return move(args, device), move(kwargs, device)


class UserCpuOffloadHook:
    """Handle returned by :func:`cpu_offload_with_hook`, to offload the model or remove the hook."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model back to host memory now."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook."""
        remove_hook_from_module(self.model)


class LayerwiseCastingHook(ModelHook):
    """Stores a layer's weights in one dtype and computes in another.

    With ``non_blocking``, the host does not wait for copies.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool = False) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        return convert(module, self.storage_dtype, self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        convert(module, self.compute_dtype, self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.failed(module)
        return output

    def failed(self, module: nn.Module) -> None:
        convert(module, self.storage_dtype, self.non_blocking)


def _tensor(module: nn.Module, name: str) -> Tensor:
    place, _, last = name.rpartition(".")
    owner = module.get_submodule(place)
    found = own_parameters(owner).get(last)
    return found if found is not None else own_buffers(owner)[last]  # type: ignore[return-value]


def default_device() -> torch.device:
    """Return this machine's first accelerator, or else the CPU."""
    kind = present()
    return torch.device(kind.name, 0) if kind.name != "cpu" else torch.device("cpu")


def _device_in(values: Any) -> torch.device | None:
    """Return the device of the first tensor in nested values."""
    if isinstance(values, Tensor):
        return values.device
    inside = values.values() if isinstance(values, Mapping) else values if isinstance(values, (list, tuple)) else ()
    return next((found for value in inside if (found := _device_in(value)) is not None), None)
