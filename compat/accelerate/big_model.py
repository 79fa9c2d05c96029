"""``accelerate``'s big-model functions whose signatures differ from those of Paceline's own functions."""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ... import messages
from ...big_model import infer_device_map
from ...big_model.device_map import device_of, join_neighbors
from ...big_model.dispatch import dispatch_model
from ...big_model.empty_init import like
from ...big_model.hooks import AlignDevicesHook, SequentialHook, add_hook_to_module
from ...big_model.module_sizes import Sizes, compute_module_sizes, named_tensors, non_persistent_buffers
from ...big_model.offload import OffloadedWeightsLoader
from ...big_model.prefetch import Part
from ...big_model.quantized_layers import load_weight, quantized_layers
from ...big_model.weight_files import mapped_tensors
from ...memory.out_of_memory_retry import clear_device_cache
from ...processes.device_transfer import in_dtype
from ...torch_private import own_buffers, own_parameters, unsaved_buffers


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Any,
    value: Tensor | None = None,
    dtype: torch.dtype | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: Any = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move the parameter or buffer named ``tensor_name`` to a device, and set its value and dtype if they are given.

    If the tensor is the weight of a bitsandbytes layer, ``value`` is quantized unless it is already quantized. For an
    8-bit ``value``, pass its scales as ``fp16_statistics``. With ``clear_cache``, the memory of replaced values is
    returned to the device. ``tied_params_map`` has no effect.
    """
    _tell_ties("set_module_tensor_to_device", tied_params_map)
    moves = _set_tensor(module, tensor_name, device, value, dtype, fp16_statistics, non_blocking)
    if clear_cache and moves:
        clear_device_cache()


def _set_tensor(
    module: nn.Module,
    tensor_name: str,
    device: Any,
    value: Tensor | None,
    dtype: torch.dtype | None = None,
    scales: Tensor | None = None,
    non_blocking: bool = False,
) -> bool:
    """Set a tensor; return True if its old value occupied memory on an accelerator."""
    place, _, name = tensor_name.rpartition(".")
    owner = module.get_submodule(place)
    if name == "weight" and value is not None and "" in quantized_layers(owner):
        more = {} if scales is None else {"SCB": scales}
        load_weight(owner, {"weight": value if dtype is None else value.to(dtype), **more}, torch.device(device))
        return False
    held: dict[str, Any] = own_parameters(owner) if name in own_parameters(owner) else own_buffers(owner)
    old = held.get(name)
    if old is None:
        raise ValueError(
            f"{type(owner).__name__} has no parameter or buffer {name!r} (in {tensor_name!r}). Check the name."
        )
    if value is None and old.device.type == "meta" and torch.device(device).type != "meta":
        raise ValueError(
            f"{tensor_name} has a shape but no value yet, so it cannot be moved to {device}. Pass its value as "
            "value=..."
        )
    if value is not None and value.shape != old.shape:
        raise ValueError(
            f"{tensor_name} has shape {tuple(old.shape)}, but the value has shape {tuple(value.shape)}. Pass a "
            "value of the same shape."
        )
    new = (old if value is None else value).detach()
    kind = old.dtype if dtype is None else in_dtype(new.dtype, dtype)
    new = new.to(device, kind, non_blocking=non_blocking)
    held[name] = like(old, new) if isinstance(old, nn.Parameter) else new
    return old.device.type not in ("cpu", "meta")


def _tell_ties(where: str, tied_params_map: Any) -> None:
    messages.ignored(where, "it would only save memory", tied_params_map=tied_params_map or None)


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers with their names."""
    return named_tensors(module, recurse, include_buffers, remove_non_persistent)


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of buffers that are not in the ``state_dict``; with ``fqns``, their full names."""
    names = non_persistent_buffers(module) if recurse else set(unsaved_buffers(module))
    return names if fqns else {name.rpartition(".")[2] for name in names}


def compute_module_total_buffer_size(model: nn.Module, dtype: Any = None, special_dtypes: Any = None) -> int:
    """Return the size of a model's buffers in bytes."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def get_max_memory(max_memory: Mapping[Any, int | str] | None = None) -> dict[Any, float]:
    """Like Paceline's function of the same name, but without a disk limit if none is passed."""
    return _without_disk(infer_device_map.get_max_memory(max_memory), max_memory)


@functools.wraps(infer_device_map.get_balanced_memory)
def get_balanced_memory(model: nn.Module, max_memory: Any = None, *args: Any, **kwargs: Any) -> dict[Any, float]:
    """Like Paceline's function of the same name, but without a disk limit if none is passed."""
    return _without_disk(infer_device_map.get_balanced_memory(model, max_memory, *args, **kwargs), max_memory)


def _without_disk(limits: dict[Any, float], given: Mapping[Any, Any] | None) -> dict[Any, float]:
    return {device: limit for device, limit in limits.items() if device != "disk" or "disk" in (given or ())}


@functools.wraps(infer_device_map.infer_auto_device_map)
def infer_auto_device_map(*args: Any, **kwargs: Any) -> OrderedDict[str, Any]:
    """Like Paceline's function of the same name, but returns an OrderedDict."""
    return OrderedDict(infer_device_map.infer_auto_device_map(*args, **kwargs))


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the size in bytes of a model and of its largest submodule, with the names of all submodules of that size.

    For a model without submodules, the sizes and names are those of its own tensors.
    """
    sizes = Sizes(model)
    parts = [
        (sizes.of(part), name)
        for name, part in infer_device_map.smallest_parts(model)
        if isinstance(part, nn.Module) and part is not model
    ]
    if not any(True for _ in model.children()):
        parts = [(tensor.nbytes, name) for name, tensor in (*model.named_parameters(), *model.named_buffers())]
    largest = max((size for size, _ in parts), default=0)
    return sizes.of(model), (largest, [name for size, name in parts if size == largest])


def get_max_layer_size(
    modules: Sequence[tuple[str, Any]], module_sizes: Mapping[str, int], no_split_module_classes: Sequence[str]
) -> tuple[int, list[str]]:
    """Return the size in bytes of the largest layer that is not split, and the names of all layers of that size."""
    found: list[tuple[int, str]] = []
    for prefix, module in modules:
        inside = {type(part).__name__ for part in module.modules()} if isinstance(module, nn.Module) else set()
        whole = [name for name in no_split_module_classes if name in inside]
        parts = infer_device_map.smallest_parts(module, whole) if isinstance(module, nn.Module) else [("", module)]
        names = [".".join(filter(None, (prefix, name))) for name, _ in parts]
        found += [(module_sizes[name], name) for name in names]
    largest = max((size for size, _ in found), default=0)
    return largest, [name for size, name in found if size == largest]


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, Any]],
) -> tuple[int, list[str], list[Any]]:
    """Return the total size in bytes of a module and its tied modules, and the names and objects of the tied modules.

    Each tied tensor is counted once. The tied modules are in the order of ``tied_params``.
    """
    owners = [[one for one in modules_to_treat if tied.startswith(f"{one[0]}.")] for tied in tied_params]
    with_ties = {found[0][0]: found[0][1] for found in owners if found}
    names = list(with_ties)
    twice = sum(module_sizes[tied] for tied in tied_params if any(tied.startswith(f"{name}.") for name in names))
    return module_size + sum(module_sizes[name] for name in names) - twice, names, list(with_ties.values())


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Merge entries of sibling modules on the same device into one entry for their parent, in place; return the map."""
    prefix = f"{module_name}." if module_name else ""
    inside = {name: one for name, one in device_map.items() if name.startswith(prefix)}
    short = join_neighbors({name.removeprefix(prefix): one for name, one in inside.items()})
    others = {name: one for name, one in device_map.items() if name not in inside}
    device_map.clear()
    device_map.update({**others, **{f"{prefix}{name}" if name else module_name: one for name, one in short.items()}})
    return device_map


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return True if a transformers model is configured to tie its embeddings."""
    return bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))


def check_tied_parameters_on_same_device(tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Do nothing, because offloaded tensors, whether tied or not, are copied to the device that uses them."""


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Tie each group of named parameters again, using the group's first parameter that has values."""
    for names in tied_params:
        found = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
        values = [own_parameters(owner)[key] for owner, key in found]
        kept = next((value for value in values if value is not None and not value.is_meta), None)
        for owner, key in found if kept is not None else ():
            own_parameters(owner)[key] = kept


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Return a key that is equal for tensors that share their storage."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


# ---- files -----------------------------------------------------------------------------------------------------------


def load_state_dict(checkpoint_file: str | os.PathLike[str], device_map: Any = None) -> dict[str, Tensor]:
    """Load the tensors in a file onto the devices that a device map assigns, and return the tensors by name."""
    found = dict(mapped_tensors(Path(checkpoint_file)))
    if device_map is None:
        return found
    devices = {name: device_of(name, device_map) for name in found}
    return {
        name: value.to("cpu" if devices[name] in (None, "disk") else devices[name]) for name, value in found.items()
    }


def load_offloaded_weights(model: nn.Module, index: Mapping[str, Any] | None, offload_folder: Any) -> None:
    """Load offloaded values from a folder into a model."""
    for name in index or ():
        value = OffloadedWeightsLoader(save_folder=offload_folder, index=index)[name]
        _set_tensor(model, name, "cpu", value)


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return the ``state_dict``, including the values of offloaded parameters."""
    return model.state_dict()


def get_state_dict_from_offload(
    module: nn.Module, module_name: str, state_dict: dict[str, Any], device_to_put_offload: Any = "cpu"
) -> dict[str, Any]:
    """Add the values of a module's tensors to ``state_dict``.

    ``module_name`` is the dotted name of one of the tensors.
    """
    prefix = module_name.rpartition(".")[0]
    for name, tensor in named_tensors(module, recurse=False):
        state_dict[f"{prefix}.{name}" if prefix else name] = tensor.detach().to(device_to_put_offload)
    return state_dict


def extract_submodules_state_dict(state_dict: Mapping[str, Any], submodule_names: Sequence[str]) -> dict[str, Any]:
    """Return the entries that belong to the given submodules."""
    return {
        name: value
        for name, value in state_dict.items()
        if any(name == module or name.startswith(f"{module}.") for module in submodule_names)
    }


# ---- hooks -----------------------------------------------------------------------------------------------------------


def has_offloaded_params(module: nn.Module) -> bool:
    """Return True if a module's weights are offloaded, and are loaded only while the module runs."""
    return _part_of(module) is not None


def _part_of(module: nn.Module) -> Part | None:
    hook = getattr(module, "_hf_hook", None)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    return next((one.part for one in hooks if isinstance(one, AlignDevicesHook) and one.part is not None), None)


@contextmanager
def align_module_device(module: nn.Module, execution_device: Any = None) -> Iterator[None]:
    """Context manager that puts a module's own parameters on a device.

    By default, this is the device on which an offloaded module runs.
    """
    part = _part_of(module) if execution_device is None else None
    if part is not None:
        part.enter()
        try:
            yield
        finally:
            part.leave()
        return
    before = {name: tensor.data for name, tensor in module.named_parameters(recurse=False)}
    try:
        for parameter in module.parameters(recurse=False) if execution_device is not None else ():
            parameter.data = parameter.data.to(execution_device)
        yield
    finally:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.data_ptr() != before[name].data_ptr():
                before[name].copy_(parameter.data)
                parameter.data = before[name]


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Any,
    skip_keys: Any = None,
    preload_module_classes: Any = None,
    tied_params_map: Any = None,
) -> None:
    """Make each module that has its own tensors move its inputs to a device.

    A module whose class is in ``preload_module_classes`` moves the inputs for all its submodules. ``tied_params_map``
    has no effect.
    """
    _tell_ties("attach_execution_device_hook", tied_params_map)
    whole = type(module).__name__ in (preload_module_classes or ())
    if not hasattr(module, "_hf_hook") and any(True for _ in named_tensors(module, recurse=whole)):
        add_hook_to_module(module, AlignDevicesHook(execution_device, skip_keys=skip_keys))
    for child in () if whole else module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Any = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Any = None,
    preload_module_classes: Any = None,
    tied_params_map: Any = None,
) -> None:
    """Make a module move its inputs to the execution device, and make its submodules load their weights when they run.

    ``module_name`` is the prefix of the names in ``weights_map``; ``tied_params_map`` has no effect.
    """
    _tell_ties("attach_align_device_hook", tied_params_map)
    if not offload:
        attach_execution_device_hook(module, execution_device, skip_keys, preload_module_classes)
        return
    values = None
    if weights_map is not None:
        names = (name for name, _ in named_tensors(module, buffers=offload_buffers))
        values = {name: weights_map[f"{module_name}.{name}" if module_name else name] for name in names}
    dispatch_model(
        module,
        {"": "cpu"},
        execution_device,
        values,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=True,
    )


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Any = None,
    offload: Any = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Any = None,
    preload_module_classes: Any = None,
    tied_params_map: Any = None,
) -> None:
    """Call :func:`attach_align_device_hook` for each block. Devices and ``offload`` may be dicts keyed by block."""
    _tell_ties("attach_align_device_hook_on_blocks", tied_params_map)
    if not isinstance(execution_device, Mapping):
        execution_device = {module_name: execution_device}
    for name, device in execution_device.items():
        offloaded = offload.get(name, False) if isinstance(offload, Mapping) else offload
        block = module.get_submodule(name)
        attach_align_device_hook(
            block, device, offloaded, weights_map, offload_buffers, name, skip_keys, preload_module_classes
        )
