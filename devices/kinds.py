"""Look up the kind of a device: ``kind_of(tensor.device)``."""

from __future__ import annotations

import torch

from .base import DeviceKind
from .cpu import CPU
from .cuda import CUDA
from .generic import Generic
from .hidden import are_hidden
from .mps import MPS
from .tpu import TPU
from .xpu import XPU

#: CUDA and ROCm, for the few features that only these have, such as NVIDIA's tools.
CUDA_KIND = CUDA()
#: All kinds with a class of their own, best first; kinds known only by torch's name are added on first use.
_KINDS: dict[str, DeviceKind] = {kind.name: kind for kind in (CUDA_KIND, MPS(), XPU(), TPU(), CPU())}


def kind_of(device: torch.device | str) -> DeviceKind:
    """Return the kind of a device, given the device or the name of its type."""
    name = device if isinstance(device, str) else device.type
    return _KINDS.get(name) or _KINDS.setdefault(name, Generic(name))


def reported() -> str | None:
    """Return the name of the accelerator that torch was built for or that a package added; None if there is none."""
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def accelerators() -> list[DeviceKind]:
    """Return all kinds except the CPU, best first, even kinds that this machine lacks; empty if devices are hidden."""
    if are_hidden():
        return []
    kinds = [kind for kind in _KINDS.values() if kind.name != "cpu"]
    name = reported()
    return kinds if name is None or name in _KINDS else [*kinds, kind_of(name)]


def present() -> DeviceKind:
    """Return the best kind that this process sees: an accelerator, or else the CPU."""
    return next((kind for kind in accelerators() if kind.is_available()), _KINDS["cpu"])
