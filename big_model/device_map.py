"""Device maps, which assign a device to each part of a model by module or tensor name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .. import messages
from ..devices.kinds import kind_of, reported
from ..torch_private import APPLY
from .module_sizes import named_tensors

#: A device: the number of an accelerator, ``"cpu"``, ``"disk"``, or a name for ``torch.device``.
Device = int | str
DeviceMap = dict[str, Device]


def is_offloaded(device: Any, main_device: Any) -> bool:
    """Return True if weights on ``device`` must be fetched to the main device before they are used."""
    return device == "disk" or (_is_host(device) and not _is_host(main_device))


def _is_host(device: Any) -> bool:
    return str(device).partition(":")[0] == "cpu"


def main_device_of(device_map: Mapping[str, Any]) -> Any:
    """Return the device on which offloaded parts run: the first accelerator in the map, or else the CPU."""
    return next((device for device in device_map.values() if not (device == "disk" or _is_host(device))), "cpu")


def device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """Return the device that a map assigns to a module or tensor; None if no entry of the map covers it."""
    while True:
        if name in device_map:
            return device_map[name]
        if not name:
            return None
        name = name.rpartition(".")[0]


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Check that a device map covers every tensor of a model and nothing else, and that its devices exist.

    Raises:
        ValueError: a tensor is missing, or a name or a device is unknown.
    """
    check_coverage(model, device_map)
    for name, device in device_map.items():
        if device != "disk":
            torch_device(device, f"device_map[{name!r}]")


def check_coverage(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Check that a device map, which may be for another machine, covers every tensor of a model and nothing else.

    Raises:
        ValueError: a tensor is missing, or a name is unknown.
    """
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    tensors = [name for name, _ in named_tensors(model)]
    odd = [name for name in device_map if name not in known and name not in tensors]
    if odd:
        near = messages.did_you_mean(odd[0], [*known, *tensors])
        raise ValueError(
            f"device_map has an entry for {odd[0]!r}, which is not in {type(model).__name__}.{near} Remove or rename "
            "this entry."
        )
    missing = [name for name in tensors if device_of(name, device_map) is None]
    if missing:
        raise ValueError(
            f"device_map does not cover {len(missing)} of the {len(tensors)} tensors in {type(model).__name__}: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}. Add entries for these tensors or their "
            "modules, or an entry '' for all tensors without an entry."
        )


def torch_device(device: Any, what: str) -> torch.device:
    """Convert an entry of a device map to a torch device.

    ``what`` is the entry's name in error messages.

    Raises:
        ValueError: ``device`` is not a device, or this process does not see that device.
    """
    try:
        if isinstance(device, int) and not isinstance(device, bool):
            device = torch.device(reported() or "cuda", device)
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        choices = ("cpu", "disk", "cuda:0", "mps")
        more = ", or the number of a GPU"
        raise ValueError(f"{what}: {messages.unknown('device', device, choices, more)}") from error
    if found.type == "cpu":
        return torch.device("cpu")
    count = kind_of(found).count() if found.type != "meta" else 0
    if found.type != "meta" and (found.index or 0) >= count:
        seen = f"only {count} of this kind" if count else "no such device"
        raise ValueError(
            f"{what} is {str(found)!r}, but this process sees {seen}. Use 'cpu' or 'disk', or make more devices "
            "visible."
        )
    return found


class Refusal:
    """Replaces ``_apply`` of a dispatched module with a method that raises an error.

    Methods that move or convert a module, such as ``to`` and ``half``, call ``_apply`` of that module and of all its
    submodules. The error is therefore also raised if a parent module is moved or converted.
    """

    def __init__(self, name: str, where: str) -> None:
        self.name = name
        self.where = where

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"This call would move or convert {self.name}, which was dispatched to {self.where}, and would undo its "
            "device map. Load the model again with a different device_map, max_memory or dtype, or first call "
            "remove_hook_from_submodules(model) from paceline.big_model.hooks."
        )


def spread_in(module: nn.Module) -> nn.Module | None:
    """Return the first submodule that was dispatched with a device map, or None if there is none."""
    return next((part for part in module.modules() if isinstance(vars(part).get(APPLY), Refusal)), None)


def join_neighbors(device_map: Mapping[str, Device]) -> DeviceMap:
    """Return the shortest equivalent map, in which a module has a single entry if all its parts are on one device."""
    below: dict[str, set[Device]] = {}
    for name, device in device_map.items():
        for prefix in _prefixes(name):
            below.setdefault(prefix, set()).add(device)
    return {
        next(prefix for prefix in _prefixes(name) if len(below[prefix]) == 1): device
        for name, device in device_map.items()
    }


def _prefixes(name: str) -> list[str]:
    parts = name.split(".") if name else []
    return [".".join(parts[:end]) for end in range(len(parts) + 1)]
