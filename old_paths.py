"""Make modules importable by their former names. Such an import prints a note with the module's current name."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
from types import ModuleType
from typing import Any

_PACKAGE = __name__.partition(".")[0]
_MOVED = {
    "accelerator.compat": "compat.accelerate",
    "checkpoint.verify": "checkpoint.checksums",
    "loggers.messages": "messages",
    "strategies.big_model": "big_model",
    "strategies.big_model.hooks": "big_model.hooks",
    "strategies.heap": "processes.cpu_memory",
    "trainer.accelerator": "accelerator",
    "trainer.accelerator.compat": "compat.accelerate",
    "trainer.accelerator.progress": "accelerator.progress_bar",
    "trainer.accelerator.trackers": "accelerator.trackers",
    "trainer.cli": "cli",
    "trainer.cli.main": "cli.main",
    "trainer.data": "data",
    "trainer.doctor": "doctor",
    "trainer.doctor.measure": "doctor.doctor",
    "trainer.estimating": "estimate.memory_estimate",
    "trainer.memory": "memory.out_of_memory_retry",
    "trainer.settings": "settings",
    "trainer.tuner": "tuner",
    "tuner.restore": "tuner.saved_state",
}


class OldPaths(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder for former module names.

    It must come first in ``sys.meta_path``. Otherwise, Python might find an empty folder that an upgrade left behind.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec for a former name; None for any other name."""
        package, _, inner = name.partition(".")
        if package != _PACKAGE or inner not in _MOVED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=any(old.startswith(f"{inner}.") for old in _MOVED))

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Import the module from its current location and print a note."""
        from . import messages

        inner = spec.name.partition(".")[2]
        messages.info_once(f"{_PACKAGE}.{inner} is now {_PACKAGE}.{_MOVED[inner]}. Import the module by its new name.")
        module = importlib.import_module(f"{_PACKAGE}.{_MOVED[inner]}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which Python has replaced; the module's code has already run."""
        module.__spec__ = module.__spec__ and module.__spec__.loader_state
