"""Compute the sizes of a model's parts in bytes, and find its tied parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_private import unsaved_buffers

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def size_in_bytes(size: int | str, what: str) -> int:
    """Convert a size to bytes: ``"10GB"`` gives 10,000,000,000, and ``"10GiB"`` gives 10,737,418,240.

    ``what`` is the argument's name in the error message.

    Raises:
        ValueError: ``size`` is not a valid size.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B)\s*", size.upper()) if isinstance(size, str) else None
    number = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if number <= 0:
        raise ValueError(
            f"{what}={size!r} is not a valid size. Pass a number of bytes, or a string such as '5GB', '500MB' or "
            "'2GiB'."
        )
    return number


class Sizes:
    """The sizes of a model's tensors in bytes, in the dtypes in which they will be loaded.

    ``dtype`` and ``special_dtypes`` are the same as for :func:`compute_module_sizes`.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | str | None = None,
        special_dtypes: Mapping[str, torch.dtype | str] | None = None,
        buffers: bool = True,
    ) -> None:
        self.model = model
        self._dtype = as_dtype(dtype)
        self._special = {name: as_dtype(value) for name, value in (special_dtypes or {}).items()}
        self._buffers = buffers
        self.bytes: dict[int, int] = {}
        for name, tensor in named_tensors(model, buffers=buffers):
            self.bytes[id(tensor)] = self._size(name, tensor)

    def _size(self, name: str, tensor: Tensor) -> int:
        dtype = self._special.get(name, self._dtype if tensor.is_floating_point() else None)
        return tensor.numel() * (dtype or tensor.dtype).itemsize

    def within(self, module: nn.Module, recurse: bool = True) -> set[int]:
        """Return the IDs of the tensors in a module; each ID occurs once, even if the tensor has several names."""
        return {id(tensor) for _, tensor in named_tensors(module, recurse=recurse, buffers=self._buffers)}

    def of(self, module: nn.Module) -> int:
        """Return the size of a module in bytes, including all submodules."""
        return self.sum(self.within(module))

    def sum(self, ids: set[int]) -> int:
        """Return the total size of the tensors with the given IDs, in bytes."""
        return sum(self.bytes[one] for one in ids)


def named_tensors(
    module: nn.Module, recurse: bool = True, buffers: bool = True, persistent_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers with their names; tied tensors occur under each of their names.

    With ``persistent_only``, buffers that are not in the state dict are excluded.
    """
    yield from module.named_parameters(recurse=recurse, remove_duplicate=False)
    if buffers:
        left_out = non_persistent_buffers(module) if persistent_only else set()
        for name, buffer in module.named_buffers(recurse=recurse, remove_duplicate=False):
            if name not in left_out:
                yield name, buffer


def names_of(module: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter and buffer, keyed by the tensor's ID."""
    names: dict[int, list[str]] = {}
    for name, tensor in named_tensors(module):
        names.setdefault(id(tensor), []).append(name)
    return names


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of the buffers that are not in the state dict."""
    return {
        f"{name}.{key}" if name else key
        for name, part in module.named_modules(remove_duplicate=False)
        for key in unsaved_buffers(part)
    }


def compute_module_sizes(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the size in bytes of each module (``""`` is the entire model) and tensor of a model, keyed by name.

    ``dtype`` is the dtype to assume for floating-point tensors; None means their current dtype. ``special_dtypes``
    overrides this dtype for individual tensors, by name. With ``buffers_only``, parameters are excluded.
    """
    sizes = Sizes(model, dtype, special_dtypes)
    found: dict[str, int] = {}
    seen: dict[str, set[int]] = {}
    for name, tensor in model.named_buffers(remove_duplicate=False) if buffers_only else named_tensors(model):
        parts = name.split(".")
        for end in range(len(parts) + 1):
            prefix = ".".join(parts[:end])
            counted = seen.setdefault(prefix, set())
            if id(tensor) not in counted:
                counted.add(id(tensor))
                found[prefix] = found.get(prefix, 0) + sizes.bytes[id(tensor)]
    return found or {"": 0}


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of tied parameters, with one list of names per parameter."""
    names = names_of(model)
    return [sorted(names[id(one)]) for one in model.parameters() if len(names[id(one)]) > 1]


def as_dtype(dtype: Any) -> torch.dtype | None:
    """Convert a dtype's name (``"bfloat16"``, ``"torch.bfloat16"``) to a dtype; a dtype is returned unchanged.

    Raises:
        ValueError: torch has no dtype with that name.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype={dtype!r} is not a torch dtype. Pass torch.bfloat16 or 'bfloat16', for example.")
    return found
