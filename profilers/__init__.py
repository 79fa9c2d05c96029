"""Profilers, selected by name or object in ``Trainer(profiler=...)``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..doctor.doctor import Doctor
    from .advanced import AdvancedProfiler
    from .base import PassThroughProfiler, Profiler
    from .pytorch import PyTorchProfiler
    from .simple import SimpleProfiler

__all__ = ["AdvancedProfiler", "Doctor", "PassThroughProfiler", "Profiler", "PyTorchProfiler", "SimpleProfiler"]

_FILES = {
    "AdvancedProfiler": ".advanced",
    "Doctor": "..doctor.doctor",
    "PassThroughProfiler": ".base",
    "Profiler": ".base",
    "PyTorchProfiler": ".pytorch",
    "SimpleProfiler": ".simple",
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_FILES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
