"""Offload weights to a folder on disk, and read them back."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import messages
from .module_sizes import as_dtype
from .weight_files import Pages, map_file, tensors_of_safetensors

_INDEX = "index.json"
_CHUNK = 16 * 2**20


def offload_weight(
    weight: Tensor,
    weight_name: str,
    offload_folder: str | os.PathLike[str],
    index: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Write a tensor's bytes to a file in a folder atomically, creating the folder if it does not exist.

    Returns ``index`` with a new entry that contains the tensor's dtype and shape.

    Raises:
        OSError: the file could not be written.
    """
    index = {} if index is None else index
    folder = Path(offload_folder)
    path = folder / f"{weight_name}.dat"
    dtype = dtype or weight.dtype
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    pages = Pages()
    flat = weight.detach().reshape(-1)
    step = max(1, _CHUNK // max(flat.element_size(), dtype.itemsize))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            for start in range(0, flat.numel(), step):
                part = flat[start : start + step]
                file.write(part.to("cpu", dtype).contiguous().view(torch.uint8).numpy().data)
                pages.give_back(part)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        size = flat.numel() * dtype.itemsize
        raise OSError(
            error.errno, f"{weight_name!r} ({size} bytes) cannot be offloaded: {error.strerror}", str(path)
        ) from error
    index[weight_name] = {"dtype": str(dtype).removeprefix("torch."), "shape": list(weight.shape)}
    return index


def save_offload_index(index: Mapping[str, Any], offload_folder: str | os.PathLike[str]) -> None:
    """Add entries to a folder's index."""
    if index:
        path = Path(offload_folder) / _INDEX
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps({**known, **index}, indent=2), encoding="utf-8")
        temporary.replace(path)


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, Tensor]) -> None:
    """Write all tensors of a state dict to a folder, with an index."""
    index: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> Tensor:
    """Memory-map a tensor from the file that :func:`offload_weight` wrote.

    Raises:
        ValueError: the file's size does not match the index.
    """
    path, shape = Path(weight_file), tuple(weight_info["shape"])
    dtype = as_dtype(weight_info["dtype"]) or torch.float32
    expected = torch.Size(shape).numel() * dtype.itemsize
    if path.stat().st_size != expected:
        raise ValueError(
            f"{str(path)!r} has {path.stat().st_size} bytes, but a {dtype} tensor of shape {shape} has {expected}. The "
            "folder has been changed or belongs to another model. Offload the weights again."
        )
    return map_file(path, dtype, shape)


class Stored(NamedTuple):
    """A tensor as it is stored, before it is moved to its device.

    Attributes:
        value: the stored values.
        dtype: the dtype that the tensor should have.
        in_file: whether the values are mapped from a file.
    """

    value: Tensor
    dtype: torch.dtype
    in_file: bool


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """A mapping from names to tensors. The tensors are in a state dict, or in files that are mapped on first use.

    Args:
        state_dict: tensors in memory.
        save_folder: a folder that :func:`offload_state_dict` wrote.
        index: entries of the folder's index, or ``{"safetensors_file": path, "weight_name": name}`` for a tensor in a
            safetensors file; None reads the folder's index.
        device: accepted and ignored, because tensors are on the CPU.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: Any = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("OffloadedWeightsLoader needs a state_dict, a save_folder or an index. Pass one of them.")
        self.state_dict = dict(state_dict or {})
        self.save_folder = save_folder
        if index is None and save_folder is not None:
            index = json.loads((Path(save_folder) / _INDEX).read_text(encoding="utf-8"))
        self.index = dict(index or {})
        self.device = device
        self._unread: dict[Path, dict[str, Tensor]] = {}

    def __getitem__(self, key: str) -> Tensor:
        found = self.stored(key)
        return found.value.to(found.dtype)

    def stored(self, key: str) -> Stored:
        """Return a tensor as it is stored, before it is converted to the dtype in the index."""
        if key in self.state_dict:
            value = self.state_dict[key]
            return Stored(value, value.dtype, in_file=False)
        entry = self.index[key]
        if entry.get("safetensors_file") is None:
            value = load_offloaded_weight(Path(self.save_folder or ".") / f"{key}.dat", entry)
        else:
            value = self._map(Path(entry["safetensors_file"]), entry.get("weight_name", key))
        return Stored(value, as_dtype(entry.get("dtype")) or value.dtype, in_file=True)

    def _map(self, file: Path, name: str) -> Tensor:
        """Return a tensor from a file. The file is mapped only once for all its tensors.

        If the same tensor is requested twice, the file is mapped again, so that changing one of the results does not
        change the other.
        """
        if name not in self._unread.get(file, ()):
            self._unread[file] = dict(tensors_of_safetensors(file))
        if name not in self._unread[file]:
            near = messages.did_you_mean(name, self._unread[file])
            raise ValueError(
                f"The index of offloaded weights expects {name!r} in {str(file)!r}, which does not contain it.{near} "
                "The file has been changed or belongs to another model. Create the index again."
            )
        return self._unread[file].pop(name)

    def __iter__(self) -> Iterator[str]:
        return iter({**self.state_dict, **self.index})

    def __len__(self) -> int:
        return len({**self.state_dict, **self.index})


class PrefixedDataset(Mapping[str, Tensor]):
    """A view of the tensors whose names begin with a prefix; the prefix is removed from the names."""

    def __init__(self, dataset: Mapping[str, Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self.prefix) for name in self.dataset if name.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
