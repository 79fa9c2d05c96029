"""The CPU."""

from __future__ import annotations

from .base import DeviceKind


class CPU(DeviceKind):
    """The CPU. Its random state is the host's, and its memory the process's, which other code reads."""

    name = "cpu"
    title = "CPU"
