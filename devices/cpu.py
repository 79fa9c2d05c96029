"""The CPU."""

from __future__ import annotations

from .base import DeviceKind


class CPU(DeviceKind):
    """The CPU. Its RNG state is the host's, and its memory use is the process's; other code reads both."""

    name = "cpu"
    title = "CPU"
