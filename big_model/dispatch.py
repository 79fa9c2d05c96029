"""Distribute a model across accelerators, host memory and disk, and run it as if it were on one device."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_private import APPLY
from .device_map import Refusal, check_device_map, device_of, is_offloaded, main_device_of, torch_device
from .empty_init import give
from .hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    default_device,
    remove_hook_from_module,
)
from .infer_device_map import smallest_parts
from .module_sizes import named_tensors, names_of
from .offload import OffloadedWeightsLoader, Stored, load_offloaded_weight, offload_weight, save_offload_index
from .prefetch import Fetcher, Part
from .weight_files import Pages, is_aligned

_NO_FORWARD = nn.Module.forward


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Any],
    main_device: Any = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Any = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Move the parts of a model to the devices in a map, make the model run on these devices, and return the model.

    A part in host memory or on disk is copied to the main device when it runs and freed afterward, while the next part
    is prefetched. If the CPU is the main device, weights on disk are used directly from the mapped file, without a
    copy. Outputs are bit-identical to those of the model on one device, as long as each module reads only its own
    weights. A module that reads another module's weight directly gets the stored tensor, which may be offloaded. On the
    CPU, computing directly with values in a file may change the last bits of a product, unless the file is aligned to
    64 bytes, as Paceline's own files are. Only one thread at a time may run the model, and the files must not change
    while the model is in use. To train a model that does not fit on one device, use ``strategy="fsdp"``.

    Args:
        model: a model with all its values, or on the meta device if ``state_dict`` or ``offload_index`` has the values.
        device_map: device (a number, ``"cpu"``, ``"disk"``) by module or tensor name; ``""`` means all others.
        main_device: device on which offloaded parts run; None means the first accelerator in the map, or else the CPU.
        state_dict: values of offloaded parts, if the model does not contain them.
        offload_dir: folder for weights with device ``"disk"`` that no safetensors file contains in the right dtype.
        offload_index: index of ``offload_dir`` (or of safetensors files), if it already exists.
        offload_buffers: whether to offload buffers too.
        skip_keys: keyword arguments that are not moved to a part's device.
        preload_module_classes: classes, or their names, whose instances are fetched as a unit; None means the model's
            blocks.
        force_hooks: whether to attach hooks even if everything is on one device.

    Raises:
        ValueError: the map does not cover the model or has unknown names, or it puts weights on disk but there is no
            folder for them.
    """
    check_device_map(model, device_map)
    _remove_dispatch(model)
    main = torch_device(main_device_of(device_map) if main_device is None else main_device, "main_device")
    offloaded = {name: device for name, device in device_map.items() if is_offloaded(device, main)}
    folder = offload_dir if offload_index is not None else None
    weights = OffloadedWeightsLoader(state_dict, folder, offload_index or {})
    if len(set(map(str, device_map.values()))) == 1 and not offloaded and not force_hooks:
        _place(model, device_map, main, weights, None, offload_buffers)
        check_filled(model)
        model.to(torch_device(next(iter(device_map.values())), "device_map"))
    else:
        _place(model, device_map, main, weights, offload_dir, offload_buffers)
        _attach(model, device_map, main, offload_buffers, skip_keys, preload_module_classes)
        _forbid_moves(model, bool(offloaded))
    check_filled(model)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def cpu_offload(
    model: nn.Module,
    execution_device: Any = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Any = None,
) -> nn.Module:
    """Keep a model's weights in host memory, and copy each part of the model to a device while that part runs.

    Returns the model, which runs on ``execution_device``; None means the first accelerator, or else the CPU.
    The other arguments are the same as for :func:`dispatch_model`.
    """
    main = default_device() if execution_device is None else execution_device
    rest = {"preload_module_classes": preload_module_classes, "force_hooks": True}
    return dispatch_model(model, {"": "cpu"}, main, state_dict, offload_buffers=offload_buffers, **rest)


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Any = None,
    offload_buffers: bool = False,
    preload_module_classes: Any = None,
) -> nn.Module:
    """Write a model's weights to a folder, and copy each part of the model to a device while that part runs.

    Returns the model, which runs on ``execution_device``; None means the first accelerator, or else the CPU.
    The other arguments are the same as for :func:`dispatch_model`.
    """
    main = default_device() if execution_device is None else execution_device
    rest = {"offload_buffers": offload_buffers, "preload_module_classes": preload_module_classes}
    return dispatch_model(model, {"": "disk"}, main, offload_dir=offload_dir, **rest)


def cpu_offload_with_hook(
    model: nn.Module, execution_device: Any = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep an entire model in host memory until it runs, and then on the device until another model runs.

    Args:
        model: the model.
        execution_device: device on which the model runs; None means the first accelerator, or else the CPU.
        prev_module_hook: hook of the previous model in a pipeline; that model is moved back when this model runs.

    Returns:
        The model and its hook, which has the methods ``offload()`` and ``remove()``.
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store each layer's weights in a smaller dtype than the layer computes in.

    Args:
        module: the model.
        storage_dtype: dtype between forward passes, such as ``torch.float8_e4m3fn``.
        compute_dtype: dtype during forward passes.
        skip_modules_pattern: regular expressions for the names of modules that keep their dtype, as do their
            submodules.
        skip_modules_classes: classes of modules that keep their dtype, as do their submodules.
        non_blocking: if True, the host does not wait for copies.
    """
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    left_out: tuple[str, ...] = ()
    for name, part in module.named_modules():
        if isinstance(part, skip_modules_classes or ()) or any(re.search(one, name) for one in patterns):
            left_out += (f"{name}." if name else "",)
        if isinstance(part, _CAST) and not f"{name}.".startswith(left_out):
            add_hook_to_module(part, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)


_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


# ---- placing values --------------------------------------------------------------------------------------------------


def _place(
    model: nn.Module,
    device_map: Mapping[str, Any],
    main: torch.device,
    weights: OffloadedWeightsLoader,
    folder: str | os.PathLike[str] | None,
    offload_buffers: bool,
) -> None:
    """Move each tensor to its device. A tied tensor goes to the device assigned to the first of its names.

    Values that are in files stay in the files.
    """
    pages, seen, index, names = Pages(), set(), {}, names_of(model)
    buffers = set() if offload_buffers else {id(buffer) for buffer in model.buffers()}
    for name, tensor in list(named_tensors(model)):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        device = device_of(name, device_map)
        found = weights.stored(name) if name in weights else Stored(tensor.data, tensor.dtype, in_file=False)
        value, dtype, in_file = found
        if value.is_meta:
            continue
        in_file = in_file or not value.numel() or pages.holds(value)
        if is_offloaded(device, main) and id(tensor) in buffers:
            device = main
        if device != "disk":
            target = torch_device(device, f"device_map[{name!r}]")
            value = value.to(target, dtype, copy=in_file and not is_aligned(value)).contiguous()
        elif not in_file or value.dtype != dtype:
            value = _written(name, found, folder, index)
        give(model, names[id(tensor)], tensor, value)
    if folder is not None:
        save_offload_index(index, folder)


def _written(name: str, found: Stored, folder: str | os.PathLike[str] | None, index: dict[str, Any]) -> Tensor:
    value, dtype, in_file = found
    if folder is None:
        why = f" (its file has {value.dtype})" if in_file else ""
        raise ValueError(
            f"device_map puts {name!r} on disk as {dtype}{why}, but there is no folder to write it to. Pass a folder "
            "with enough space for the weights as offload_dir=... (offload_folder=... in load_checkpoint_and_dispatch "
            "and from_pretrained)."
        )
    offload_weight(value, name, folder, index, dtype)
    return load_offloaded_weight(Path(folder) / f"{name}.dat", index[name])


def check_filled(model: nn.Module) -> None:
    """Check that no tensor of a model is on the meta device.

    Raises:
        RuntimeError: some tensors are on the meta device.
    """
    empty = [name for name, tensor in named_tensors(model) if tensor.is_meta]
    if empty:
        raise RuntimeError(
            f"{type(model).__name__} has no values for {len(empty)} of its tensors: "
            f"{', '.join(empty[:5])}{', ...' if len(empty) > 5 else ''}. Load weights that include these tensors. "
            "Buffers that the model computes itself need real memory, so create the model with "
            "init_empty_weights(include_buffers=False)."
        )


# ---- hooks for running -----------------------------------------------------------------------------------------------


def _attach(
    model: nn.Module,
    device_map: Mapping[str, Any],
    main: torch.device,
    offload_buffers: bool,
    skip_keys: str | Sequence[str] | None,
    whole: Any,
) -> None:
    fetcher = Fetcher()
    kept = set() if offload_buffers else {id(buffer) for buffer in model.buffers()}
    homes: dict[int, Any] = {}  # a tied tensor is on its first name's device
    for name, tensor in named_tensors(model):
        homes.setdefault(id(tensor), device_of(name, device_map))
    owned: dict[str, dict[int, Tensor]] = {}
    for name, part in _parts(model, whole, device_map):
        runner = _runner(model, name)
        runs = _run_device(runner, device_map, main)
        for tensor in [one for _, one in named_tensors(part)] if isinstance(part, nn.Module) else [part]:
            home = homes[id(tensor)]
            away = is_offloaded(home, main) and id(tensor) not in kept
            if away or (not is_offloaded(home, main) and torch_device(home, "device_map") != runs):
                owned.setdefault(runner, {})[id(tensor)] = tensor
    devices = {name: _run_device(name, device_map, main) for name in owned}
    parts = {name: Part(list(tensors.values()), devices[name], fetcher) for name, tensors in owned.items()}
    for part, following in itertools.pairwise(parts.values()):
        part.following = following
    inputs = _input_devices(model, device_map, main)
    for name in dict.fromkeys(["", *inputs, *parts] if parts else inputs):
        device = devices.get(name, inputs.get(name, main))
        rest = {"part": parts.get(name), "fetcher": fetcher if parts and not name else None}
        hook = AlignDevicesHook(device, io_same_device=not name and bool(inputs), skip_keys=skip_keys, **rest)
        add_hook_to_module(model.get_submodule(name), hook, append=True)


def _parts(model: nn.Module, whole: Any, device_map: Mapping[str, Any]) -> list[tuple[str, nn.Module | Tensor]]:
    """Return the named parts that are each fetched as a unit.

    These are the parts from :func:`smallest_parts`, split further where the device map splits them.
    """
    split = {name[:end] for name in device_map for end, letter in enumerate(name) if letter == "."}
    split |= {""} if any(device_map) else set()
    return [found for name, part in smallest_parts(model, whole) for found in _split(name, part, split)]


def _split(name: str, part: nn.Module | Tensor, split: set[str]) -> list[tuple[str, nn.Module | Tensor]]:
    if name not in split or not isinstance(part, nn.Module):
        return [(name, part)]
    below = [*part.named_children(), *named_tensors(part, recurse=False)]
    prefix = f"{name}." if name else ""
    return [found for key, one in below for found in _split(f"{prefix}{key}", one, split)]


def _run_device(name: str, device_map: Mapping[str, Any], main: torch.device) -> torch.device:
    """Return the device on which a module runs."""
    device = device_of(name, device_map)
    return main if device is None or is_offloaded(device, main) else torch_device(device, "device_map")


def _remove_dispatch(model: nn.Module) -> None:
    """Remove the hooks of an earlier dispatch, without changing values or other hooks."""
    for part in model.modules():
        hook = vars(part).get("_hf_hook")
        hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
        others = [one for one in hooks if one is not None and not isinstance(one, AlignDevicesHook)]
        if hook is not None and len(others) < len(hooks):
            vars(part)["_hf_hook"] = others[0] if len(others) == 1 else SequentialHook(*others)
            if not others:
                remove_hook_from_module(part)
    for part in model.modules():
        if isinstance(vars(part).get(APPLY), Refusal):
            del vars(part)[APPLY]


def _input_devices(model: nn.Module, device_map: Mapping[str, Any], main: torch.device) -> dict[str, torch.device]:
    """Return the device of each module that moves its inputs, beginning with the model.

    The result is empty if all modules run on the CPU.
    """
    run = {
        name: main if is_offloaded(one, main) else torch_device(one, "device_map") for name, one in device_map.items()
    }
    if {device.type for device in (main, *run.values())} == {"cpu"}:
        return {}
    found = {"": main}
    for name, device in run.items():
        for below in _called(model, name):
            found.setdefault(below, device)
    return found


def _called(model: nn.Module, name: str) -> list[str]:
    """Return the module ``name`` or, if it is only a container, the modules called inside it; empty for a tensor."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return []
    if type(module).forward is not _NO_FORWARD:
        return [name]
    return [one for key, _ in module.named_children() for one in _called(model, f"{name}.{key}" if name else key)]


def _runner(model: nn.Module, name: str) -> str:
    """Return the module ``name`` or, if it cannot be called (a container, a tensor), its nearest callable parent."""
    while name:
        try:
            if type(model.get_submodule(name)).forward is not _NO_FORWARD:
                return name
        except AttributeError:  # a tensor
            pass
        name = name.rpartition(".")[0]
    return name


def _forbid_moves(model: nn.Module, offloaded: bool) -> None:
    where = "host memory or disk" if offloaded else "several devices"
    for part in (model, *(one for one in model.modules() if isinstance(vars(one).get("_hf_hook"), AlignDevicesHook))):
        vars(part)[APPLY] = Refusal(type(part).__name__, where)
