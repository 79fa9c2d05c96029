"""Any other device that ``torch.accelerator`` reports: NPU, HPU, MTIA, and others that a package adds."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import DeviceKind


class Generic(DeviceKind):
    """A kind of device that is known only by the name that torch gives it.

    Functions that torch requires of every package that adds a device come from the module that the package registers
    (``torch.npu``, ``torch.hpu``); all others come from ``torch.accelerator``.
    """

    is_numbered: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.title = f"{name.upper()} device"

    @cached_property
    def module(self) -> Any:
        """The module of this kind, such as ``torch.npu``."""
        return torch.get_device_module(self.name)

    def _function(self, name: str) -> Any:
        """Return the function called ``name`` from the kind's own module, or else from ``torch.accelerator``."""
        return getattr(self.module, name, None) or getattr(torch.accelerator, name)

    # ---- which devices -----------------------------------------------------------------------------------------------

    def count(self) -> int:
        found = torch.accelerator.current_accelerator()
        return torch.accelerator.device_count() if found is not None and found.type == self.name else 0

    def is_initialized(self) -> bool:
        if not self.is_available():
            return False
        asked = getattr(self.module, "is_initialized", None)
        return asked is None or bool(asked())

    def initialize(self) -> None:
        prepare = getattr(self.module, "init", None)
        if prepare is not None:
            prepare()

    def make_current(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device.index or 0)

    def name_of(self, device: torch.device | int) -> str:
        asked = getattr(self.module, "get_device_name", None)
        return str(asked(device)) if asked is not None else self.title

    def fork_obstacle(self) -> str | None:
        if not self.is_initialized():
            return None
        return f"{self.title}s were already used in this process, and a fork of it might not be able to use them"

    def collective_backend(self) -> str:
        import torch.distributed as dist

        try:
            return dist.get_default_backend_for_device(self.name)
        except ValueError:  # no backend was registered for this kind
            return "gloo"

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def autocast_dtypes(self) -> tuple[torch.dtype, ...]:
        asked = getattr(self.module, "get_amp_supported_dtype", None)
        return tuple(asked()) if asked is not None else super().autocast_dtypes()

    # ---- time --------------------------------------------------------------------------------------------------------

    @cached_property
    def _pins_memory(self) -> bool:
        try:
            return torch.empty(1).pin_memory().is_pinned()
        except RuntimeError:  # this kind has no pinned memory
            return False

    def overlaps_copies(self) -> bool:
        return self.is_available() and self._pins_memory

    def synchronize(self, device: torch.device | None = None) -> None:
        self._function("synchronize")(device)

    def new_stream(self, device: torch.device) -> Any:
        return torch.Stream(device)

    def current_stream(self, device: torch.device) -> Any:
        return torch.accelerator.current_stream(device)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return stream

    def new_event(self, timed: bool = False) -> Any:
        own = getattr(self.module, "Event", None)
        return torch.Event(self.name, enable_timing=timed) if own is None else own(enable_timing=timed)

    # ---- memory ------------------------------------------------------------------------------------------------------

    @cached_property
    def _counts_memory(self) -> bool:
        try:
            self._function("max_memory_allocated")()
        except RuntimeError:  # this kind does not count its memory
            return False
        return True

    def counts_memory(self) -> bool:
        return self.is_available() and self._counts_memory

    def total_memory(self, device: torch.device | int) -> int | None:
        found = self._memory_info(device)
        return None if found is None else found[1]

    def free_memory(self, device: torch.device | int | str) -> int | None:
        found = self._memory_info(device)
        return None if found is None else found[0]

    def _memory_info(self, device: torch.device | int | str) -> tuple[int, int] | None:
        """Return a device's free and total bytes; None if they are unknown."""
        asked = getattr(self.module, "mem_get_info", None) or getattr(torch.accelerator, "get_memory_info", None)
        try:
            return None if asked is None else asked(device)
        except RuntimeError:  # this kind does not report its memory
            return None

    def allocated_memory(self, device: torch.device | None = None) -> int:
        return self._function("memory_allocated")(device) if self.counts_memory() else 0

    def peak_memory(self, device: torch.device | None = None) -> int:
        return self._function("max_memory_allocated")(device) if self.counts_memory() else 0

    def reset_peak_memory(self, device: torch.device | None = None) -> None:
        if self.counts_memory():
            self._function("reset_peak_memory_stats")(device)

    def release_cached_memory(self) -> None:
        if self.counts_memory():
            self._function("empty_cache")()

    def stats(self, device: torch.device) -> dict[str, Any]:
        return dict(self._function("memory_stats")(device)) if self.counts_memory() else {}

    # ---- random numbers ----------------------------------------------------------------------------------------------

    def random_state(self, device: torch.device) -> Tensor | None:
        return self.module.get_rng_state(device).cpu()

    def set_random_state(self, state: Tensor, device: torch.device) -> None:
        self.module.set_rng_state(state.cpu(), device)

    def random_states(self) -> Any:
        if not self.is_initialized():
            return None
        return [self.random_state(torch.device(self.name, index)) for index in range(self.count())]

    def set_random_states(self, states: Any) -> bool:
        found = self.count()
        for index, state in enumerate(states[:found]):
            self.set_random_state(state, torch.device(self.name, index))
        return found == len(states)

    def seed(self, value: int) -> None:
        one = getattr(self.module, "manual_seed", None) or self.module.manual_seed_all
        one(value)
