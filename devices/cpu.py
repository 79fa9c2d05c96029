"""The CPU."""

from __future__ import annotations

from .base import DeviceKind


class CPU(DeviceKind):
    """The CPU. Other code reads the host's RNG state and the process's memory use."""

    name = "cpu"
    title = "CPU"
