"""Load a model's weights from other tools' files: one file, several files with an index, or a folder of such files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import messages
from . import sharded_loading
from .deferred_weights import Note, is_noting, is_to_be_noted, write_note
from .device_map import check_device_map, device_of, main_device_of, torch_device
from .dispatch import check_filled, dispatch_model
from .empty_init import give
from .infer_device_map import Spread, plan_device_map
from .module_sizes import as_dtype, named_tensors, names_of
from .offload import load_offloaded_weight, offload_weight, save_offload_index
from .weight_files import Pages, copy_into, mapped_tensors, weight_files


class UnmatchedNames(NamedTuple):
    """Names that do not match after loading.

    Attributes:
        missing_keys: names in the model that are in no file.
        unexpected_keys: names in the files that are not in the model.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Spread | Mapping[str, Any] | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Any = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Any = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load each weight directly to its device, make the model run across these devices, and return the model.

    Args:
        model: the model, usually created inside :func:`init_empty_weights`.
        checkpoint: a ``.safetensors`` file, a file written by ``torch.save``, an index, or a folder with one of these.
        device_map: a name that :func:`plan_device_map` accepts, or a map for :func:`dispatch_model`. None leaves all
            weights on their devices and moves weights on the meta device to the CPU.
        max_memory: see :func:`plan_device_map`.
        no_split_module_classes: see :func:`plan_device_map`.
        offload_folder: folder for weights on ``"disk"`` that must be converted to another dtype. Other weights are read
            from their own files and need no folder.
        offload_buffers: whether to offload the buffers of offloaded parts too.
        dtype: dtype for floating-point tensors; None means the model's dtype, or the file's if the model has no values
            yet.
        offload_state_dict: has no effect, because at most one chunk of a file is in memory in addition to the model.
        skip_keys: keyword arguments that are not moved to a part's device.
        preload_module_classes: classes whose instances are fetched as a unit; None means the classes that are not
            split.
        force_hooks: whether to attach hooks even if everything is on one device.
        strict: whether missing and unexpected names cause an error instead of a warning.
        full_state_dict: has no effect, because each process reads the files.
        broadcast_from_rank0: has no effect, because each process reads the files.

    Raises:
        FileNotFoundError: there are no weights, or the index lists a file that does not exist.
        ValueError: a file is damaged, a tensor has the wrong shape, or the map or a limit is invalid.
        RuntimeError: names do not match although ``strict`` is set, or a tensor has no values.

    Example:
        >>> with init_empty_weights():                                             # doctest: +SKIP
        ...     model = MyModel(config)
        >>> model = load_checkpoint_and_dispatch(model, "weights/", device_map="auto", max_memory={"cpu": "2GB"})
    """
    if is_noting():
        raise RuntimeError(
            f"load_checkpoint_and_dispatch({type(model).__name__}) places weights on the devices of one process, but "
            "a strategy is about to shard the model across processes. Call "
            "load_checkpoint_in_model(model, checkpoint) instead."
        )
    _tell_reading("load_checkpoint_and_dispatch", offload_state_dict, full_state_dict, broadcast_from_rank0)
    weight_files(Path(checkpoint))  # raises before a plan is printed
    whole = no_split_module_classes if preload_module_classes is None else preload_module_classes
    main = None
    if isinstance(device_map, str):
        limits = (max_memory, no_split_module_classes, dtype, None if dtype else _dtypes_on_meta(model, checkpoint))
        plan = plan_device_map(model, device_map, *limits, offload_buffers=offload_buffers)
        device_map, main = plan.device_map, plan.main_device
    load_checkpoint_in_model(
        model, checkpoint, device_map, offload_folder, dtype, offload_buffers=offload_buffers, strict=strict
    )
    if device_map is None:
        check_filled(model)
        return model
    return dispatch_model(
        model,
        device_map,
        main,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=whole,
        force_hooks=force_hooks,
    )


def _tell_reading(where: str, offload_state_dict: bool | None, full_state_dict: bool, broadcast: bool) -> None:
    """Report once that the given arguments do not change how files are read."""
    messages.ignored(
        where,
        "each process reads its own weights from the files, one chunk at a time",
        offload_state_dict=offload_state_dict or None,
        full_state_dict=None if full_state_dict else False,
        broadcast_from_rank0=broadcast or None,
    )


def _dtypes_on_meta(model: nn.Module, checkpoint: str | os.PathLike[str]) -> dict[str, torch.dtype]:
    """Return the dtype that each tensor on the meta device will get: its dtype in the first file that contains it."""
    empty = {name for name, tensor in named_tensors(model) if tensor.is_meta}
    found: dict[str, torch.dtype] = {}
    for file in weight_files(Path(checkpoint)) if empty else ():
        pages: Pages | None = None
        for name, value in mapped_tensors(file):
            pages = pages or Pages()
            pages.give_back(value, around=True)
            if name in empty:
                found.setdefault(name, value.dtype)
    return found


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> UnmatchedNames:
    """Load a model's parameters and buffers from files, each directly to its device and dtype.

    Files are mapped into memory and copied chunk by chunk, so at most one chunk is in memory besides the model. A
    tensor on ``"disk"`` is not copied at all, but stays mapped from its file. Code that a file references is never run.

    If a strategy shards the model (``"fsdp"`` or tensor parallelism), no process holds all weights. If parameters are
    already sharded (in a prepared model, or by torch's ``fully_shard``), each process copies its own shards. In
    ``configure_model``, and in ``accelerator.init_module()``, loading parameters on the meta device is deferred: each
    parameter gets only a note with the path of its file, which is read after the model has been sharded. Names and
    shapes are checked immediately. If the run resumes from a checkpoint, the checkpoint takes precedence. Every process
    must call this function.

    The arguments are the same as for :func:`load_checkpoint_and_dispatch`, except that ``device_map`` must be a dict or
    None. None leaves each tensor on its device and moves tensors on the meta device to the CPU. Floating-point tensors
    whose names contain one of ``keep_in_fp32_modules`` become float32. ``offload_8bit_bnb`` must be False, because
    quantized layers cannot be offloaded. ``offload_state_dict``, ``full_state_dict`` and ``broadcast_from_rank0`` have
    no effect.

    Raises:
        FileNotFoundError: there are no weights, or the index lists a file that does not exist.
        ValueError: a file is damaged, or a tensor has the wrong shape.
        RuntimeError: names are missing or unexpected, and ``strict`` is set.
    """
    _tell_reading("load_checkpoint_in_model", offload_state_dict, full_state_dict, broadcast_from_rank0)
    if offload_8bit_bnb:
        raise NotImplementedError(
            "load_checkpoint_in_model: offload_8bit_bnb=True is not supported, because quantized layers cannot be "
            "offloaded. Use load_and_quantize_model, which leaves offloaded modules in 16 bits."
        )
    wanted = as_dtype(dtype)
    if wanted is not None and not wanted.is_floating_point:
        raise ValueError(f"dtype={wanted} would round weights to integers. Pass a floating-point dtype, or None.")
    with sharded_loading.together(model):
        files = weight_files(Path(checkpoint))
        if device_map is not None:
            check_device_map(model, device_map)
        sharded_loading.reshard(model)
        filler = _Filler(model, device_map, offload_folder, wanted, offload_buffers, keep_in_fp32_modules or ())
        loaded = _load(model, files, filler)
        _report(model, loaded, strict, Path(checkpoint))
    return loaded


def _load(model: nn.Module, files: list[Path], filler: _Filler) -> UnmatchedNames:
    unexpected: list[str] = []
    for file in files:
        pages: Pages | None = None
        for name, value in mapped_tensors(file):
            pages = pages or Pages()
            if name not in filler.tensors:
                unexpected.append(name)
            elif name not in filler.filled:
                _check_shape(name, filler.tensors[name], value, file, model)
                filler.fill(name, value, pages, file)
            pages.give_back(value, around=True)
    filler.close()
    return UnmatchedNames([name for name in model.state_dict() if name not in filler.filled], unexpected)


class _Filler:
    """Sets the values of a model's tensors; a tied tensor is set only once, under all its names."""

    def __init__(
        self,
        model: nn.Module,
        device_map: Mapping[str, Any] | None,
        folder: str | os.PathLike[str] | None,
        dtype: torch.dtype | None,
        offload_buffers: bool,
        in_float32: Sequence[str],
    ) -> None:
        self.model = model
        self.device_map = device_map
        self.folder = folder
        self.dtype = dtype
        self.in_float32 = in_float32
        self.tensors = dict(named_tensors(model))
        self.filled: set[str] = set()
        self._names = names_of(model)
        self._buffers = set() if offload_buffers else {id(buffer) for buffer in model.buffers()}
        self._index: dict[str, Any] = {}
        self._mapped: set[int] = set()

    @torch.no_grad()
    def fill(self, name: str, value: Tensor, pages: Pages, file: Path) -> None:
        """Set a tensor to a value mapped from a file. The value is sharded, deferred, copied or left on disk."""
        own = self.tensors[name]
        names = self._names[id(own)]
        self.filled.update(names)
        dtype = self._dtype(name, own, value)
        if sharded_loading.in_parts(own):
            sharded_loading.fill_parts(self.model, names, own, value, self.dtype, pages)  # type: ignore[arg-type]
            return
        if is_to_be_noted(own):
            write_note(self.model, names, own, Note(file.absolute(), name, self.dtype), dtype)
            return
        device = self._device(name, own)
        if device == "disk":
            if value.numel() and value.data_ptr() in self._mapped:
                value = dict(mapped_tensors(file))[name]  # map the file again: changes must not affect both names
            self._mapped.add(value.data_ptr())
            give(self.model, names, own, self._on_disk(name, value, dtype))
        elif own.device == device and own.dtype == dtype:
            copy_into(own.data, value, pages)
        else:
            made = torch.empty(value.shape, dtype=dtype, device=device)
            copy_into(made, value, pages)
            give(self.model, names, own, made)

    def _dtype(self, name: str, own: Tensor, value: Tensor) -> torch.dtype:
        if not value.is_floating_point():
            return value.dtype if own.is_meta else own.dtype
        if any(part in name for part in self.in_float32):
            return torch.float32
        return self.dtype or (value.dtype if own.is_meta else own.dtype)

    def _device(self, name: str, own: Tensor) -> torch.device | str:
        if self.device_map is None:
            return torch.device("cpu") if own.is_meta else own.device
        device = device_of(self._names[id(own)][0], self.device_map)
        if device == "disk" and id(own) in self._buffers:
            device = main_device_of(self.device_map)
        return device if device == "disk" else torch_device(device, f"device_map for {name!r}")

    def _on_disk(self, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype == value.dtype:
            return value
        if self.folder is None:
            raise ValueError(
                f"The device map puts {name!r} on disk as {dtype}, but its file stores {value.dtype}, and there is no "
                f"folder for the converted values. Pass offload_folder=..., or dtype={value.dtype}."
            )
        offload_weight(value, name, self.folder, self._index, dtype)
        return load_offloaded_weight(Path(self.folder) / f"{name}.dat", self._index[name])

    def close(self) -> None:
        """Write the index of the converted files."""
        if self.folder is not None:
            save_offload_index(self._index, self.folder)


def _check_shape(name: str, own: Tensor, value: Tensor, file: Path, model: nn.Module) -> None:
    if own.shape != value.shape:
        raise ValueError(
            f"{name} has the shape {tuple(value.shape)} in {file.name!r}, but {tuple(own.shape)} in "
            f"{type(model).__name__}. Create the model with the same arguments as when its weights were saved."
        )


def _report(model: nn.Module, loaded: UnmatchedNames, strict: bool, path: Path) -> None:
    kinds = ((loaded.missing_keys, "missing from the checkpoint"), (loaded.unexpected_keys, "unexpected"))
    differences = "; ".join(f"{len(names)} {what} ({_some(names)})" for names, what in kinds if names)
    if not differences:
        return
    text = f"The names in {str(path)!r} do not all match {type(model).__name__}: {differences}."
    if strict:
        raise RuntimeError(f"{text} Create the same model that the weights were saved from, or use strict=False.")
    messages.warn(f"{text} Missing weights keep their current values or are initialized by their layers.")


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
