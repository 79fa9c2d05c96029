"""The most memory that was in use at once, between two moments."""

from __future__ import annotations

import gc
from contextlib import suppress
from pathlib import Path

import torch

from ..processes.cpu_memory import give_back_memory

_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def start(device: torch.device) -> None:
    """Give back what is not in use, and count from here on."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    give_back_memory()
    with suppress(OSError):  # another system, or a container that forbids it
        _RESET.write_text("5")


def read(device: torch.device) -> int | None:
    """Bytes of the device's memory (of this process, on the CPU) since :func:`start`; None where nobody counts."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:") and device.type == "cpu":
                return int(line.split()[1]) * 1024
    return None
