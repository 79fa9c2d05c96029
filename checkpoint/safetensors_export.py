"""Export bare weights: the tensors of a ``state_dict``, without duplicates, in files that other tools can read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import messages
from ..big_model.weight_files import ALIGNMENT

#: The format's names for dtypes. The format stores tensors in the reverse of this order.
_KINDS = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
}
#: Metadata entry that pads the file header, so that the tensors are aligned and can be used in place.
_PADDING = "padding"


class Bare(NamedTuple):
    """The contents of a ``state_dict``, split into tensors, duplicates and other entries.

    Attributes:
        tensors: the tensors by name, without duplicates.
        twins: maps each duplicate name to the name under which the tensor is kept.
        others: maps the name of each non-tensor entry to its type, for messages (``"a list"``).
    """

    tensors: dict[str, Tensor]
    twins: dict[str, str]
    others: dict[str, str]


def bare(state: Mapping[str, Any], tied: Iterable[str] = ()) -> Bare:
    """Split a ``state_dict`` into tensors, duplicates and other entries.

    If a tensor has several names, those that match a regular expression in ``tied`` are dropped.
    """
    patterns = [re.compile(pattern) for pattern in tied]
    found = Bare({}, {}, {})
    owners: dict[Any, str] = {}
    names = sorted(state, key=lambda name: any(pattern.search(name) for pattern in patterns))
    for name in names:
        value = state[name]
        if not isinstance(value, Tensor):
            found.others[name] = messages.a(value)
        elif value.numel() and (owner := owners.setdefault(_place(value), name)) != name:
            found.twins[name] = owner
    kept = [name for name in state if name not in found.twins and name not in found.others]
    found.tensors.update((name, state[name]) for name in kept)
    return found


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return (memory_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is the same for all tensors that use the same storage."""
    return tensor.device, tensor.untyped_storage().data_ptr() or id(tensor)


def write_safetensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file and sync it to disk.

    Tensors that share storage are copied, as the format requires. ``metadata`` is added to the file header.
    """
    from safetensors.torch import save_file

    seen: set[Any] = set()
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        alone = whole and memory_of(tensor) not in seen
        seen.add(memory_of(tensor))
        apart[name] = tensor.detach().contiguous() if alone else tensor.detach().contiguous().clone()
    metadata = {"format": "pt", **metadata}
    head = _head_bytes(apart, metadata)
    save_file(apart, path, {**metadata, _PADDING: " " * (-head % ALIGNMENT)})
    sync(path)


def _head_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
    """Return the offset at which tensor data would start without padding (safetensors 0.4 to 0.8); 0 if unknown."""
    entries: dict[str, Any] = {"__metadata__": {**metadata, _PADDING: ""}}
    order, end = list(_KINDS), 0
    if not {tensor.dtype for tensor in tensors.values()} <= _KINDS.keys():
        return 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-order.index(item[1].dtype), item[0])):
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    return 8 + len(json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode())


def write_torch(value: Any, path: Path) -> None:
    """Write a file with ``torch.save`` and sync it to disk."""
    torch.save(value, path)
    sync(path)


def sync(path: Path) -> None:
    """Sync a file to disk."""
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())
