"""The profilers where they are looked for: ``from paceline.profilers import SimpleProfiler``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .trainer import profilers as _room

if TYPE_CHECKING:
    from .trainer.doctor.measure import Doctor
    from .trainer.profilers import AdvancedProfiler, PassThroughProfiler, Profiler, PyTorchProfiler, SimpleProfiler

__all__ = ["AdvancedProfiler", "Doctor", "PassThroughProfiler", "Profiler", "PyTorchProfiler", "SimpleProfiler"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_room, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
