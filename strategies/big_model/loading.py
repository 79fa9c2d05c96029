"""Weights of a model from the files that other tools write: one file, several with an index, or a folder of either."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...loggers import messages
from . import sharded
from .noted import Note, is_to_be_noted, write_note

#: What the weights of a whole model are called in a folder, the first that is there counts.
_NAMES = ("model.safetensors", "pytorch_model.bin")
_ENDINGS = (".safetensors", ".bin", ".pt", ".pth")


class Loaded(NamedTuple):
    """What did not fit.

    Attributes:
        missing_keys: names of the model that no file has.
        unexpected_keys: names in the files that the model does not have.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    strict: bool = False,
) -> Loaded:
    """Fill a model's parameters and buffers, one tensor after the other, where each of them is.

    Parameters on the meta device come to the CPU. Files are mapped into memory, so that a tensor is in memory once
    besides its place in the model. What a file names is never run.

    Where a strategy splits the model over processes (``"fsdp"``, tensor parallel), no process holds the whole: each
    copies its own part of a parameter that lies in parts already (of a prepared model, or of one that torch's
    ``fully_shard`` has split). In ``configure_model``, and within ``accelerator.init_module()``, a parameter on the
    meta device only gets a note of its file, which is read after the split; names and shapes are checked at once, and
    a checkpoint that the run goes on from wins. Every process must call.

    Args:
        model: as it was built, or split.
        checkpoint: a ``.safetensors`` file, one that torch saved, an index (``.index.json``), or a folder with one of
            these.
        dtype: what floating-point tensors become; None: the model's, or the file's where the model has no values yet.
        strict: missing and unexpected names are an error; otherwise one warning.

    Raises:
        FileNotFoundError: there are no weights, or the index names a file that is not there.
        ValueError: a file is damaged, or a tensor has another shape.
        RuntimeError: with ``strict``, what is missing or unexpected.
    """
    with sharded.together(model):
        loaded = _load(model, weight_files(Path(checkpoint)), dtype)
        _tell(model, loaded, strict, Path(checkpoint))
    return loaded


def _load(model: nn.Module, files: list[Path], dtype: torch.dtype | None) -> Loaded:
    sharded.reshard(model)
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    twins: dict[int, list[str]] = {}
    for name, tensor in own.items():
        twins.setdefault(id(tensor), []).append(name)
    found: set[str] = set()
    unexpected: list[str] = []
    for file in files:
        for name, value in _tensors(file):
            if name not in own:
                unexpected.append(name)
                continue
            _check_shape(name, own[name], value, file, model)
            _fill(model, twins[id(own[name])], own[name], value, dtype, Note(file.absolute(), name, dtype, _tensors))
            found.update(twins[id(own[name])])
    wanted = [name for name in model.state_dict() if name not in found]
    return Loaded(wanted, unexpected)


def weight_files(path: Path) -> list[Path]:
    """The files that hold a model's weights.

    Raises:
        FileNotFoundError: there are none, or an index names one that is not there.
    """
    if path.is_dir():
        entries = sorted(entry.name for entry in path.iterdir())
        index = [name for name in entries if name.endswith(".index.json")]
        whole = [name for name in _NAMES if name in entries]
        others = [name for name in entries if name.endswith(_ENDINGS)]
        chosen = (whole or index or (others if len(others) == 1 else []))[:1]
        if not chosen:
            listed = ", ".join(entries[:10]) or "nothing"
            raise FileNotFoundError(
                f"There are no weights of one model in {str(path)!r}, only {listed}. Name the file, or a folder with "
                f"{' or '.join(map(repr, _NAMES))} or an index (.index.json) of several."
            )
        path = path / chosen[0]
    if not path.exists():
        near = messages.did_you_mean(path.name, os.listdir(path.parent) if path.parent.is_dir() else [])
        raise FileNotFoundError(f"There are no weights at {str(path)!r}.{near}")
    if path.suffix != ".json":
        return [path]
    names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
    missing = [name for name in names if not (path.parent / name).exists()]
    if missing:
        raise FileNotFoundError(
            f"The index {str(path)!r} names {len(names)} files, of which {len(missing)} are not there: "
            f"{', '.join(missing[:5])}. Bring them to its folder."
        )
    return [path.parent / name for name in names]


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file by name, mapped into memory."""
    if file.suffix == ".safetensors":
        yield from _of_safetensors(file)
        return
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise _damaged(file, error) from error
    for name, value in state.get("state_dict", state).items():
        if isinstance(value, Tensor):
            yield name, value


def _of_safetensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    if not messages.is_installed("safetensors"):
        raise ModuleNotFoundError(
            f"{file.name!r} needs the package 'safetensors'. Install it: pip install safetensors.", name="safetensors"
        )
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                yield name, opened.get_tensor(name)
    except SafetensorError as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> ValueError:
    why = str(error).splitlines()[0] if str(error) else repr(error)
    return ValueError(
        f"The weights in {str(file)!r} cannot be read: {why}. The file is damaged or of another kind; download or "
        "write it again."
    )


def _check_shape(name: str, own: Tensor, value: Tensor, file: Path, model: nn.Module) -> None:
    if own.shape != value.shape:
        raise ValueError(
            f"{name} has the shape {tuple(value.shape)} in {file.name!r}, but {tuple(own.shape)} in "
            f"{type(model).__name__}. Build the model with the arguments it had when its weights were written."
        )


@torch.no_grad()
def _fill(
    model: nn.Module, names: list[str], own: Tensor, value: Tensor, dtype: torch.dtype | None, note: Note
) -> None:
    """Give the parameter or buffer of these names its value, or a note of where it is."""
    if sharded.in_parts(own):
        sharded.fill_parts(model, names, own, value, dtype)  # type: ignore[arg-type]
        return
    if is_to_be_noted(own):
        write_note(model, names, own, note, (dtype if value.is_floating_point() else None) or value.dtype)
        return
    floating = value.is_floating_point()
    if not own.is_meta and (dtype is None or not floating or own.dtype == dtype):
        own.copy_(value)
        return
    kept = value.to("cpu" if own.is_meta else own.device, dtype if floating else None, copy=True)
    is_parameter = isinstance(own, nn.Parameter)
    sharded.put(model, names, nn.Parameter(kept, requires_grad=own.requires_grad) if is_parameter else kept)


def _tell(model: nn.Module, loaded: Loaded, strict: bool, path: Path) -> None:
    kinds = ((loaded.missing_keys, "missing in it"), (loaded.unexpected_keys, "unexpected"))
    said = "; ".join(f"{len(names)} {what} ({', '.join(names[:5])})" for names, what in kinds if names)
    if not said:
        return
    text = f"The weights in {str(path)!r} do not fit {type(model).__name__} in all: {said}."
    if strict:
        raise RuntimeError(f"{text} Build the model they were written from, or load with strict=False.")
    messages.warn(f"{text} What is missing keeps the values it had, or gets its layer's initial ones.")
