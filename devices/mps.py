"""Apple's GPU, as torch documents it in ``torch.mps``. This code has never been run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import DeviceKind


class MPS(DeviceKind):
    """Apple's GPU. A Mac has only one.

    Torch has events for this GPU, but no streams, so copies do not overlap with computation.
    """

    name = "mps"
    title = "MPS device"
    widest_float = torch.float32

    def count(self) -> int:
        return int(torch.backends.mps.is_available())

    def is_initialized(self) -> bool:
        return self.is_available()

    def fork_obstacle(self) -> str | None:
        if not self.is_initialized():
            return None
        return "Metal does not work in a fork of this process, so the fork cannot use the MPS device"

    # ---- time --------------------------------------------------------------------------------------------------------

    def synchronize(self, device: torch.device | None = None) -> None:
        torch.mps.synchronize()

    def new_event(self, timed: bool = False) -> Any:
        return torch.mps.Event(enable_timing=timed)

    def has_timed_events(self) -> bool:
        return True

    # ---- memory ------------------------------------------------------------------------------------------------------

    def total_memory(self, device: torch.device | int) -> int | None:
        return torch.mps.recommended_max_memory()

    def free_memory(self, device: torch.device | int | str) -> int | None:
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())

    def allocated_memory(self, device: torch.device | None = None) -> int:
        return torch.mps.current_allocated_memory()

    def release_cached_memory(self) -> None:
        torch.mps.empty_cache()

    def stats(self, device: torch.device) -> dict[str, Any]:
        return {
            "current_allocated_bytes": torch.mps.current_allocated_memory(),
            "driver_allocated_bytes": torch.mps.driver_allocated_memory(),
        }

    # ---- random numbers ----------------------------------------------------------------------------------------------

    def random_state(self, device: torch.device) -> Tensor | None:
        return torch.mps.get_rng_state()

    def set_random_state(self, state: Tensor, device: torch.device) -> None:
        torch.mps.set_rng_state(state.cpu())

    def random_states(self) -> Any:
        return torch.mps.get_rng_state() if self.is_available() else None

    def set_random_states(self, states: Any) -> bool:
        if not self.is_available():
            return False
        torch.mps.set_rng_state(states.cpu())
        return True

    def seed(self, value: int) -> None:
        torch.mps.manual_seed(value)
