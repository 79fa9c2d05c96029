"""One process on one device."""

from __future__ import annotations

from typing import ClassVar

from .base import Strategy


class SingleDevice(Strategy):
    """Trains on one CPU, GPU or Apple device. Its names: ``"single_device"`` and, for the CPU, ``"cpu"``."""

    names: ClassVar[tuple[str, ...]] = ("single_device", "cpu")
