"""``accelerate``'s functions for plain values."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from ...accelerator.nested_tensors import TensorInformation
from ...big_model.module_sizes import size_in_bytes

#: Layers whose 16-bit weights are converted to float32 before training.
SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    nn.Linear,
)


def convert_bytes(size: float) -> str:
    """Format a number of bytes with a unit, such as ``"1.25 KB"`` (1 KB is 1024 bytes)."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def convert_file_size_to_int(size: int | str) -> int:
    """Return the number of bytes in a size such as ``"10GB"`` (units of 1000) or ``"10GiB"`` (units of 1024)."""
    is_zero = re.fullmatch(r"\s*0+(\.0*)?\s*[KMGT]I?B\s*|0", str(size).upper()) is not None
    return 0 if is_zero else size_in_bytes(size, "size")


def dtype_byte_size(dtype: Any) -> float:
    """Return the size of one element in bytes; 0.125 for bool."""
    if dtype == torch.bool:
        return 1 / 8
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize
    bits = re.search(r"\d+$", str(getattr(dtype, "value", dtype)))
    if bits is None:
        raise ValueError(
            f"dtype_byte_size got {dtype!r}, whose name does not end in its number of bits. Pass a torch.dtype."
        )
    return int(bits.group()) / 8


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class or function, or of any other object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return getattr(named, "__qualname__", None) or getattr(named, "__name__", str(obj))


def is_tensor_information(tensor_info: Any) -> bool:
    """Return True if a value is a TensorInformation."""
    return isinstance(tensor_info, TensorInformation)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Recursively merge ``source`` into ``destination`` and return ``destination``."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an object's attribute by its dotted name, such as ``"layer.weight"``."""
    for name in attr.split("."):
        obj = getattr(obj, name)
    return obj
