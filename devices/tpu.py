"""TPUs through the package ``torch_tpu``, which registers the device type ``"tpu"``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any, ClassVar

import torch
from torch import Tensor

from .generic import Generic


class TPU(Generic):
    """TPUs. Each process sees one TPU, and most functions come from ``torch.accelerator``."""

    one_per_process = True
    visible_variable: ClassVar[str | None] = "TPU_VISIBLE_CHIPS"

    def __init__(self) -> None:
        super().__init__("tpu")
        self.title = "TPU"

    def _function(self, name: str) -> Any:
        return getattr(torch.accelerator, name)

    def count(self) -> int:
        if "torch_tpu" not in sys.modules and importlib.util.find_spec("torch_tpu") is not None:
            importlib.import_module("torch_tpu")  # registers the device if this machine has one
        return super().count()

    def install_command(self) -> str | None:
        return None if importlib.util.find_spec("torch_tpu") is not None else 'pip install "paceline[tpu]"'

    def is_initialized(self) -> bool:
        return "torch_tpu" in sys.modules and super().is_initialized()

    def initialize(self) -> None:
        """Do nothing, because the package prepares a TPU when it is imported."""

    def name_of(self, device: torch.device | int) -> str:
        return self.title

    def fork_obstacle(self) -> str | None:
        if not self.is_initialized():
            return None
        return "a TPU was already used in this process, and a fork of it cannot use TPUs"

    def prepare_launch(self, num_processes: int) -> None:
        self.module.distributed.set_tpu_launch_env(nproc_per_node=num_processes)

    def collective_backend(self) -> str:
        return "tpu_dist"

    def overlaps_copies(self) -> bool:
        return False

    def autocast_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16,)

    def random_state(self, device: torch.device) -> Tensor | None:
        return self.module.default_generators[device.index or 0].get_state().cpu()

    def set_random_state(self, state: Tensor, device: torch.device) -> None:
        self.module.default_generators[device.index or 0].set_state(state.cpu())

    def seed(self, value: int) -> None:
        for generator in self.module.default_generators:
            generator.manual_seed(value)
