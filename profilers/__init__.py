"""Profilers, selected by name or object in ``Trainer(profiler=...)``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from ..doctor.doctor import Doctor as Doctor
    from .advanced import AdvancedProfiler as AdvancedProfiler
    from .base import PassThroughProfiler as PassThroughProfiler
    from .base import Profiler as Profiler
    from .pytorch import PyTorchProfiler as PyTorchProfiler
    from .simple import SimpleProfiler as SimpleProfiler

lazy_names(
    globals(),
    {
        ".doctor.doctor": "Doctor",
        "advanced": "AdvancedProfiler",
        "base": "PassThroughProfiler Profiler",
        "pytorch": "PyTorchProfiler",
        "simple": "SimpleProfiler",
    },
)
