"""Device kinds as objects that compare equal to their names: ``CPUAccelerator() == "cpu"``."""

from __future__ import annotations

from typing import Any

import torch

from ..devices.kinds import reported
from . import devices


class Accelerator(str):
    """A kind of device. It compares equal to its name and can be passed as ``Trainer(accelerator=...)``."""

    name = ""

    def __new__(cls) -> Accelerator:
        name: Any = cls.name
        if isinstance(name, property):  # a program's own subclass
            name = name.fget and name.fget(super().__new__(cls))
        return super().__new__(cls, name)

    def __reduce__(self) -> Any:
        return type(self), ()

    @classmethod
    def is_available(cls) -> bool:
        """Return True if this process can see a device of this kind."""
        return cls.auto_device_count() > 0

    @classmethod
    def auto_device_count(cls) -> int:
        """Return the number of devices that ``devices="auto"`` selects; 1 for the CPU."""
        return devices.count(cls.name)

    @classmethod
    def parse_devices(cls, devices: Any) -> Any:
        """Convert the ``Trainer(devices=)`` argument to device indices, or to a number of processes for the CPU."""
        found = _find(devices, cls.name)
        return len(found) if cls.name == "cpu" else [device.index or 0 for device in found]

    @classmethod
    def get_parallel_devices(cls, devices: Any) -> list[torch.device]:
        """Return the devices that a ``Trainer(devices=)`` argument selects."""
        return _find(devices, cls.name)

    def setup(self, trainer: Any) -> None:
        """Do nothing, because a Strategy sets up its own device."""

    def teardown(self) -> None:
        """Do nothing, because a Strategy releases its own device."""


class CPUAccelerator(Accelerator):
    """The CPU."""

    name = "cpu"


class CUDAAccelerator(Accelerator):
    """GPUs that torch drives through CUDA or ROCm."""

    name = "cuda"


class MPSAccelerator(Accelerator):
    """An Apple GPU."""

    name = "mps"


class XPUAccelerator(Accelerator):
    """An Intel GPU."""

    name = "xpu"


class TPUAccelerator(Accelerator):
    """A TPU, through the package ``torch_tpu``."""

    name = "tpu"


class _Registry(dict[str, type[Accelerator]]):
    """The device kinds, keyed by name."""

    def __missing__(self, name: str) -> type[Accelerator]:
        """Return a class for a kind such as ``"npu"``, which torch reports but which has no class in this file."""
        if name != reported():
            raise KeyError(name)
        return _others.setdefault(name, type(f"{name.upper()}Accelerator", (_OtherKind,), {"name": name}))

    def available_accelerators(self) -> list[str]:
        """Return the names of all device kinds, including kinds that are not available on this machine."""
        return sorted(self)

    def register(
        self, name: str, accelerator: Any = None, description: str = "", override: bool = False, **init_params: Any
    ) -> Any:
        """Add a class for a device kind, and return the class. Without ``accelerator``, return a decorator.

        Classes of Paceline's built-in kinds are not replaced, because Paceline itself drives these devices.

        Args:
            name: the kind's name, which ``Trainer(accelerator=)`` accepts if torch has devices of this kind.
            accelerator: a subclass of :class:`Accelerator`.
            description: not used.
            override: whether ``accelerator`` may replace a class that was registered under this name before.
            **init_params: not used.

        Raises:
            ValueError: if another class is registered under this name, and ``override`` is False.
        """
        if accelerator is None:
            return lambda kind: self.register(name, kind, description, override, **init_params)
        if name not in _BUILT_IN:
            if name in self and self[name] is not accelerator and not override:
                raise ValueError(
                    f"AcceleratorRegistry already has {self[name].__name__} under the name {name!r}. Choose another "
                    "name, or pass override=True to replace it."
                )
            self[name] = accelerator
        return accelerator

    def remove(self, name: str) -> None:
        """Remove a registered class."""
        del self[name]


class _OtherKind(Accelerator):
    """A device kind that has no class in this file and is known only by the name that torch reports."""

    def __reduce__(self) -> Any:
        return _other, (self.name,)


_others: dict[str, type[Accelerator]] = {}
_BUILT_IN = {
    kind.name: kind for kind in (CPUAccelerator, CUDAAccelerator, MPSAccelerator, XPUAccelerator, TPUAccelerator)
}
AcceleratorRegistry = _Registry(_BUILT_IN)


def _other(name: str) -> Accelerator:
    return AcceleratorRegistry[name]()


def _find(wanted: Any, kind: str) -> list[torch.device]:
    return devices.find_devices(wanted, kind)
