"""Weights of a model from the files that other tools write: one file, several with an index, or a folder of either."""

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


class Loaded(NamedTuple):
    """What did not fit.

    Attributes:
        missing_keys: names of the model that no file has.
        unexpected_keys: names in the files that the model does not have.
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
    """Load weights into a model, each straight to its place, and let it run from there. The same object.

    Args:
        model: usually made under :func:`init_empty_weights`.
        checkpoint: a ``.safetensors`` file, one that torch saved, an index, or a folder with one of these.
        device_map: a word or a map, as :func:`plan_device_map` and :func:`dispatch_model` take them. None: all weights
            where they are; from the meta device to the CPU.
        max_memory: see :func:`plan_device_map`.
        no_split_module_classes: see there.
        offload_folder: for weights on disk that are to have another dtype than in their files; all others are read
            from there and need no folder.
        offload_buffers: buffers of offloaded parts lie with them.
        dtype: what floating-point tensors become; None: the model's, or the file's where the model has no values.
        offload_state_dict: accepted; no more than a chunk is ever held besides the model.
        skip_keys: keyword arguments that are not moved to a part's device.
        preload_module_classes: what is fetched whole; None: what is not split.
        force_hooks: attach hooks also if all lies on one device.
        strict: missing and unexpected names are an error; otherwise one warning.
        full_state_dict: accepted; files are read by each process.
        broadcast_from_rank0: accepted, likewise.

    Raises:
        FileNotFoundError: there are no weights, or the index names a file that is not there.
        ValueError: a file is damaged, a tensor has another shape, or the map or a limit cannot be kept.
        RuntimeError: names do not fit (``strict``), or something is left without values.

    Example:
        >>> with init_empty_weights():                                             # doctest: +SKIP
        ...     model = MyModel(config)
        >>> model = load_checkpoint_and_dispatch(model, "weights/", device_map="auto", max_memory={"cpu": "2GB"})
    """
    if is_noting():
        raise RuntimeError(
            f"load_checkpoint_and_dispatch({type(model).__name__}) places weights on the devices of one process, but "
            "here a strategy is about to split them over processes. Call load_checkpoint_in_model(model, checkpoint)."
        )
    weight_files(Path(checkpoint))  # complain before a plan is shown
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


def _dtypes_on_meta(model: nn.Module, checkpoint: str | os.PathLike[str]) -> dict[str, torch.dtype]:
    """What tensors that have no values yet will be: the dtype of the first file that has them."""
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
) -> Loaded:
    """Fill a model's parameters and buffers from files, each straight to its place and type.

    Files are mapped into memory and copied chunk by chunk, so that besides the model no more than a chunk is in memory.
    A tensor whose place is ``"disk"`` is not copied at all: it stays mapped from its file, and its pages come and go.
    What a file names is never run.

    Where a strategy splits the model over processes (``"fsdp"``, tensor parallel), no process holds the whole: each
    copies its own part of a parameter that lies in parts already (of a prepared model, or of one that torch's
    ``fully_shard`` has split). In ``configure_model``, and within ``accelerator.init_module()``, a parameter on the
    meta device only gets a note of its file, which is read after the split; names and shapes are checked at once, and
    a checkpoint that the run goes on from wins. Every process must call.

    Args:
        model: as it was built, or split; what is on the meta device comes to its place.
        checkpoint: a ``.safetensors`` file, one that torch saved, an index (``.index.json``), or a folder with one of
            these.
        device_map: name of module or tensor to device; None: where each tensor is, from the meta device to the CPU.
        offload_folder: for what is on disk in another dtype; see :func:`load_checkpoint_and_dispatch`.
        dtype: what floating-point tensors become; None: the model's, or the file's where the model has no values yet.
        offload_state_dict: accepted; nothing is held.
        offload_buffers: buffers on disk too.
        keep_in_fp32_modules: parts of names whose floating-point tensors become float32 instead.
        offload_8bit_bnb: must be False: there are no 8-bit weights.
        strict: missing and unexpected names are an error; otherwise one warning.
        full_state_dict: accepted; files are read by each process.
        broadcast_from_rank0: accepted, likewise.

    Raises:
        FileNotFoundError: there are no weights, or the index names a file that is not there.
        ValueError: a file is damaged, or a tensor has another shape.
        RuntimeError: with ``strict``, what is missing or unexpected.
    """
    if offload_8bit_bnb:
        raise NotImplementedError("load_checkpoint_in_model(offload_8bit_bnb=True): Paceline has no 8-bit weights.")
    wanted = as_dtype(dtype)
    if wanted is not None and not wanted.is_floating_point:
        raise ValueError(f"dtype={wanted} would round weights to whole numbers. Pass a floating-point one, or None.")
    with sharded_loading.together(model):
        files = weight_files(Path(checkpoint))
        if device_map is not None:
            check_device_map(model, device_map)
        sharded_loading.reshard(model)
        filler = _Filler(model, device_map, offload_folder, wanted, offload_buffers, keep_in_fp32_modules or ())
        loaded = _load(model, files, filler)
        _tell(model, loaded, strict, Path(checkpoint))
    return loaded


def _load(model: nn.Module, files: list[Path], filler: _Filler) -> Loaded:
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
    return Loaded([name for name in model.state_dict() if name not in filler.filled], unexpected)


class _Filler:
    """Gives a model's tensors their values; a tied one once, under all its names."""

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
        """Give one tensor its value, which is mapped from a file."""
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
                value = dict(mapped_tensors(file))[name]  # two names of one memory: changing one is not to change both
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
                f"{name!r} is to lie on disk as {dtype}, but its file has {value.dtype}, and there is no folder to "
                f"convert it into. Pass offload_folder=..., or dtype={value.dtype}."
            )
        offload_weight(value, name, self.folder, self._index, dtype)
        return load_offloaded_weight(Path(self.folder) / f"{name}.dat", self._index[name])

    def close(self) -> None:
        """List what was written."""
        if self.folder is not None:
            save_offload_index(self._index, self.folder)


def _check_shape(name: str, own: Tensor, value: Tensor, file: Path, model: nn.Module) -> None:
    if own.shape != value.shape:
        raise ValueError(
            f"{name} has the shape {tuple(value.shape)} in {file.name!r}, but {tuple(own.shape)} in "
            f"{type(model).__name__}. Build the model with the arguments it had when its weights were written."
        )


def _tell(model: nn.Module, loaded: Loaded, strict: bool, path: Path) -> None:
    kinds = ((loaded.missing_keys, "missing from it"), (loaded.unexpected_keys, "unexpected"))
    said = "; ".join(f"{len(names)} {what} ({_some(names)})" for names, what in kinds if names)
    if not said:
        return
    text = f"The weights in {str(path)!r} do not fit {type(model).__name__} in all: {said}."
    if strict:
        raise RuntimeError(f"{text} Build the model they were written from, or load with strict=False.")
    messages.warn(f"{text} What is missing keeps the values it had, or gets its layer's initial ones.")


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
