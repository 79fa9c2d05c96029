"""The interface that each kind of device implements; its defaults are those of a CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor


class DeviceKind:
    """A kind of device, such as all CUDA GPUs of this process. There is one object per kind: see ``kind_of``.

    The defaults describe a device that computes while the host waits, has no index, and does not count its memory.

    Attributes:
        name: the ``type`` of its ``torch.device`` objects.
        title: the name of a device of this kind in messages.
    """

    name: str
    title: str
    #: Whether its devices have an index, as in ``cuda:1``.
    is_numbered: ClassVar[bool] = False
    #: Whether each of several processes on a machine sees only its own device, with index 0.
    one_per_process: bool = False
    #: Whether each process should bind its process group to its device, so that the processes connect immediately.
    binds_process_group: ClassVar[bool] = False
    #: The widest floating-point dtype that its devices compute in.
    widest_float: ClassVar[torch.dtype] = torch.float64
    #: Environment variable that selects which devices a process sees.
    visible_variable: ClassVar[str | None] = None

    # ---- which devices -----------------------------------------------------------------------------------------------

    def count(self) -> int:
        """Return the number of devices that this process sees."""
        return 1

    def is_available(self) -> bool:
        """Return True if this process sees a device of this kind."""
        return self.count() > 0

    def install_command(self) -> str | None:
        """Return the command that installs the package this kind needs; None if nothing is missing."""
        return None

    def is_initialized(self) -> bool:
        """Return True if this process has used a device of this kind. An unused device has no generator state."""
        return False

    def initialize(self) -> None:
        """Prepare the devices for use, as their first use would."""

    def make_current(self, device: torch.device) -> None:
        """Make ``device`` the current device, which a ``torch.device`` without an index refers to."""

    def name_of(self, device: torch.device | int) -> str:
        """Return the model name of a device."""
        return self.title

    def fork_obstacle(self) -> str | None:
        """Return why a fork of this process could not use the devices; None if it could."""
        return None

    def prepare_launch(self, num_processes: int) -> None:
        """Set environment variables for ``num_processes`` processes on this machine. Called before they start."""

    def collective_backend(self) -> str:
        """Return the ``torch.distributed`` backend that communicates between devices of this kind."""
        return "gloo"

    def numa_node(self, device: torch.device) -> int | None:
        """Return the NUMA node that a device is attached to; None if it is unknown."""
        return None

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def autocast_dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes that autocast can compute in."""
        return torch.bfloat16, torch.float16

    def capability(self, device: torch.device) -> tuple[int, int] | None:
        """Return a GPU's compute capability, or None for devices without one."""
        return None

    # ---- time --------------------------------------------------------------------------------------------------------

    def overlaps_copies(self) -> bool:
        """Return True if copies from pinned host memory run while the host and other streams continue."""
        return False

    def synchronize(self, device: torch.device | None = None) -> None:
        """Wait until a device (None: the current one) has finished all queued work."""

    def finish_copies(self, device: torch.device) -> None:
        """Wait until the copies that this thread has queued are done."""
        if self.overlaps_copies():
            self.current_stream(device).synchronize()
        else:
            self.synchronize(device)

    def new_stream(self, device: torch.device) -> Any:
        """Return a new stream of a device. Only kinds that overlap copies have streams."""
        raise NotImplementedError(f"Torch has no streams for the {self.title}.")

    def current_stream(self, device: torch.device) -> Any:
        """Return the stream that this thread queues work on."""
        raise NotImplementedError(f"Torch has no streams for the {self.title}.")

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Context manager in which this thread queues its work on ``stream``."""
        raise NotImplementedError(f"Torch has no streams for the {self.title}.")

    def new_event(self, timed: bool = False) -> Any:
        """Return an event with ``record``, ``query`` and ``synchronize``; if ``timed``, also ``elapsed_time`` (ms)."""
        raise NotImplementedError(f"Torch has no events for the {self.title}.")

    def has_timed_events(self) -> bool:
        """Return True if :meth:`new_event` can measure time."""
        return False

    def reporting_waits(self) -> AbstractContextManager[Any]:
        """Context manager in which torch warns whenever the host waits for a device, if torch supports this."""
        return nullcontext()

    # ---- memory ------------------------------------------------------------------------------------------------------

    def counts_memory(self) -> bool:
        """Return True if torch counts the memory in use on devices of this kind."""
        return False

    def total_memory(self, device: torch.device | int) -> int | None:
        """Return the size of a device's memory in bytes; None if it is unknown."""
        return None

    def free_memory(self, device: torch.device | int | str) -> int | None:
        """Return how many bytes of a device's memory are free; None if it is unknown."""
        return None

    def allocated_memory(self, device: torch.device | None = None) -> int:
        """Return the number of bytes in tensors on a device (None: the current one); 0 if they are not counted."""
        return 0

    def peak_memory(self, device: torch.device | None = None) -> int:
        """Return the peak number of bytes in tensors since :meth:`reset_peak_memory`; 0 if they are not counted."""
        return 0

    def reset_peak_memory(self, device: torch.device | None = None) -> None:
        """Restart the measurement of :meth:`peak_memory`."""

    def release_cached_memory(self) -> None:
        """Free device memory that torch keeps cached for later tensors."""

    def stats(self, device: torch.device) -> dict[str, Any]:
        """Return the statistics that ``DeviceStatsMonitor`` logs."""
        return {}

    # ---- random numbers ----------------------------------------------------------------------------------------------

    def random_state(self, device: torch.device) -> Tensor | None:
        """Return the state of a device's own generator as a uint8 CPU tensor of shape (n,); None if there is none."""
        return None

    def set_random_state(self, state: Tensor, device: torch.device) -> None:
        """Restore a state that :meth:`random_state` returned."""
        raise NotImplementedError(f"A {self.title} has no random number generator of its own.")

    def random_states(self) -> Any:
        """Return the states of all devices of this kind for a checkpoint; None if there are none."""
        return None

    def set_random_states(self, states: Any) -> bool:
        """Restore the result of :meth:`random_states`; return False if the number of devices has changed since then."""
        return False

    def seed(self, value: int) -> None:
        """Seed the generator of the current device."""
