"""GPUs that torch drives through CUDA or ROCm. No other file uses ``torch.cuda``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .base import DeviceKind


class CUDA(DeviceKind):
    """NVIDIA GPUs through CUDA, and AMD GPUs through ROCm, which torch calls ``cuda`` too."""

    name = "cuda"
    title = "CUDA device"
    is_numbered = True
    binds_process_group = True
    visible_variable = "CUDA_VISIBLE_DEVICES"

    # ---- which devices -----------------------------------------------------------------------------------------------

    def count(self) -> int:
        return torch.cuda.device_count()

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def is_initialized(self) -> bool:
        return torch.cuda.is_initialized()

    def initialize(self) -> None:
        torch.cuda.init()

    def make_current(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    def name_of(self, device: torch.device | int) -> str:
        return torch.cuda.get_device_name(device)

    def fork_obstacle(self) -> str | None:
        if not torch.cuda.is_initialized():
            return None
        return "CUDA was already used in this process, and a fork of it cannot use CUDA"

    def collective_backend(self) -> str:
        return "nccl"

    def numa_node(self, device: torch.device) -> int | None:
        properties: Any = torch.cuda.get_device_properties(device)
        places = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
        if None in places:
            return None
        address = "{:04x}:{:02x}:{:02x}.0".format(*places)
        try:
            return int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
        except (OSError, ValueError):
            return None

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def capability(self, device: torch.device) -> tuple[int, int] | None:
        return torch.cuda.get_device_capability(device)

    def computes_in_bfloat16(self, including_emulation: bool = True) -> bool:
        """Return True if the current GPU has bf16 arithmetic, or emulates it."""
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation)

    # ---- time --------------------------------------------------------------------------------------------------------

    def overlaps_copies(self) -> bool:
        return True

    def synchronize(self, device: torch.device | None = None) -> None:
        torch.cuda.synchronize(device)

    def new_stream(self, device: torch.device) -> Any:
        return torch.cuda.Stream(device)

    def current_stream(self, device: torch.device) -> Any:
        return torch.cuda.current_stream(device)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def new_event(self, timed: bool = False) -> Any:
        return torch.cuda.Event(enable_timing=timed)

    def has_timed_events(self) -> bool:
        return True

    @contextmanager
    def reporting_waits(self) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def counts_memory(self) -> bool:
        return True

    def total_memory(self, device: torch.device | int) -> int | None:
        return torch.cuda.get_device_properties(device).total_memory

    def free_memory(self, device: torch.device | int | str) -> int | None:
        return torch.cuda.mem_get_info(device)[0]

    def allocated_memory(self, device: torch.device | None = None) -> int:
        return torch.cuda.memory_allocated(device)

    def peak_memory(self, device: torch.device | None = None) -> int:
        return torch.cuda.max_memory_allocated(device)

    def reset_peak_memory(self, device: torch.device | None = None) -> None:
        torch.cuda.reset_peak_memory_stats(device)

    def release_cached_memory(self) -> None:
        torch.cuda.empty_cache()

    def stats(self, device: torch.device) -> dict[str, Any]:
        return torch.cuda.memory_stats(device)

    # ---- random numbers ----------------------------------------------------------------------------------------------

    def random_state(self, device: torch.device) -> Tensor | None:
        return torch.cuda.get_rng_state(device)

    def set_random_state(self, state: Tensor, device: torch.device) -> None:
        torch.cuda.set_rng_state(state.cpu(), device)

    def random_states(self) -> Any:
        return torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def set_random_states(self, states: Any) -> bool:
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        torch.cuda.set_rng_state_all([state.cpu() for state in states[:found]])
        return found == len(states)

    def seed(self, value: int) -> None:
        torch.cuda.manual_seed(value)
