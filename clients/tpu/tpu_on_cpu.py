"""Make TorchTPU see one TPU, emulated on the CPU. Python imports this on startup in the environment of ``make tpu``."""

from __future__ import annotations

import importlib.abc
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

#: The module in which TorchTPU counts the TPUs among the machine's PCI devices.
HARDWARE = "torch_tpu._internal.utils.hardware"


class _OneDevice(importlib.abc.Loader):
    """Loads ``HARDWARE`` and makes it count one device."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        module.__dict__["get_tpu_device_count"] = lambda: 1


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != HARDWARE:
            return None
        found = PathFinder.find_spec(fullname, path, target)
        if found is not None:
            found.loader = _OneDevice(found.loader)
        return found


if "TPU_LIBRARY_PATH" in os.environ and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())
