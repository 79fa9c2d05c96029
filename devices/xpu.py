"""Intel GPUs."""

from __future__ import annotations

import torch

from .generic import Generic


class XPU(Generic):
    """Intel GPUs, which torch itself drives. Processes that use them communicate through oneCCL."""

    visible_variable = "ZE_AFFINITY_MASK"

    def __init__(self) -> None:
        super().__init__("xpu")

    def count(self) -> int:
        return torch.xpu.device_count()

    def fork_obstacle(self) -> str | None:
        if not torch.xpu.is_initialized():
            return None
        return "an XPU was already used in this process, and a fork of it cannot use XPUs"

    def autocast_dtypes(self) -> tuple[torch.dtype, ...]:
        return torch.bfloat16, torch.float16

    def collective_backend(self) -> str:
        return "xccl"

    def has_timed_events(self) -> bool:
        return True
