"""The CPU."""

from __future__ import annotations

from .base import DeviceKind


class CPU(DeviceKind):
    """The CPU. Other code reads its RNG state (the host's) and its memory use (the process's)."""

    name = "cpu"
    title = "CPU"
