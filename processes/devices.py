"""Find the devices of this machine, and choose those that a run should use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from .. import messages
from ..devices.base import DeviceKind
from ..devices.hidden import HIDE, are_hidden
from ..devices.kinds import CUDA_KIND, accelerators, kind_of, reported
from .cpu_memory import give_back_memory

_CGROUP = "/sys/fs/cgroup"
_CGROUPS = (
    (f"{_CGROUP}/memory.max", f"{_CGROUP}/memory.current"),
    (f"{_CGROUP}/memory/memory.limit_in_bytes", f"{_CGROUP}/memory/memory.usage_in_bytes"),
)
AcceleratorName = Literal["auto", "cpu", "gpu", "cuda", "mps", "xpu", "tpu", "npu", "hpu"]
ACCELERATORS: tuple[AcceleratorName, ...] = get_args(AcceleratorName)
#: Device kinds that ``"gpu"`` can mean.
_GPUS = ("cuda", "mps", "xpu")


def num_cuda_devices() -> int:
    """Return the number of CUDA GPUs that this process sees."""
    return CUDA_KIND.count()


def count(kind: str) -> int:
    """Return the number of devices of a kind (``"cpu"``, ``"cuda"``, ...) that this process sees; 1 for the CPU."""
    if kind != "cpu" and are_hidden():
        return 0
    return num_cuda_devices() if kind == CUDA_KIND.name else kind_of(kind).count()


def find_best() -> tuple[str, int]:
    """Return the best kind of accelerator that this process sees and its number of devices, or ``"cpu"`` and 0."""
    found = ((kind.name, count(kind.name)) for kind in accelerators())
    return next((one for one in found if one[1]), ("cpu", 0))


def available_memory() -> int:
    """Return how many bytes of host memory this process can still allocate within its cgroup's limit."""
    give_back_memory()
    try:
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, current in _CGROUPS:
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(current).read_text()))
        except (OSError, ValueError):  # no such file, or no limit ("max")
            continue
    return max(0, free)


def find_kind(accelerator: Any) -> str:
    """Return the device kind for ``Trainer(accelerator=...)``, such as ``"cuda"`` or ``"cpu"``.

    ``"auto"`` prefers CUDA, then MPS, XPU, TPU and any other accelerator that torch reports, then the CPU; ``"gpu"``
    prefers CUDA, then MPS and XPU. The name of an accelerator that a package has added to torch selects that
    accelerator.
    """
    if not isinstance(accelerator, str):
        raise TypeError(
            f"Trainer: accelerator={accelerator!r} is {messages.a(accelerator)}. Pass one of "
            f"{messages.names(ACCELERATORS)}."
        )
    if accelerator == "xla":
        raise ValueError(
            "Trainer(accelerator='xla'): Paceline uses TPUs through torch_tpu, not through torch_xla. Choose 'tpu', or "
            "'auto' to use the best device on this machine."
        )
    if accelerator not in ACCELERATORS and accelerator != reported():
        raise ValueError(messages.unknown("accelerator", accelerator, ACCELERATORS))
    if accelerator in ("auto", "gpu"):
        for kind in accelerators():
            if (accelerator == "auto" or kind.name in _GPUS) and count(kind.name):
                return kind.name
        if accelerator == "gpu":
            raise RuntimeError(_missing("gpu", "GPU", CUDA_KIND))
        return "cpu"
    if not count(accelerator):
        kind = kind_of(accelerator)
        raise RuntimeError(_missing(accelerator, kind.title, kind))
    return accelerator


def _missing(accelerator: str, what: str, kind: DeviceKind) -> str:
    if are_hidden():
        return (
            f"Trainer(accelerator={accelerator!r}): `paceline launch --cpu` hides every {what} from this process "
            f"({HIDE} is set). Use accelerator='auto' or 'cpu', or launch without --cpu."
        )
    install, variable = kind.install_command(), kind.visible_variable
    if install is not None:
        return (
            f"Trainer(accelerator={accelerator!r}): this process sees no {what}, because the package for it is not "
            f"installed. Run: {install}. Use accelerator='auto' or 'cpu' to train without it."
        )
    visible = os.environ.get(variable) if variable is not None else None
    why = f" ({variable}={visible})" if visible is not None else ""
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return (
        f"Trainer(accelerator={accelerator!r}): this process sees no {what}{why}, and torch {torch.__version__} is "
        f"built {build}. Use accelerator='auto' or 'cpu', make a device visible, or install a torch build (or an "
        "extension of torch) that supports this device."
    )


def find_devices(devices: Any, kind: str) -> list[torch.device]:
    """Return the devices of a kind that ``Trainer(devices=...)`` selects.

    ``devices`` is a number (``2``, ``"2"``), a list of indices (``[0, 1]``, ``"0,1"``), ``-1`` for all, or ``"auto"``
    (one process for the CPU, or all devices of any other kind).
    """
    present = count(kind)
    if devices == "auto":
        indices: Sequence[int] = range(present)
    elif isinstance(devices, (list, tuple)) or (isinstance(devices, str) and "," in devices):
        listed = devices.split(",") if isinstance(devices, str) else devices
        indices = [_integer(d, devices) for d in listed if str(d).strip()]
    else:
        number = _integer(devices, devices)
        indices = range(present if number == -1 else max(number, 0))
    if not indices:
        raise ValueError(
            f"Trainer(devices={devices!r}) selects no device. Pass a positive number, a list of indices, -1 for "
            "all devices, or 'auto'."
        )
    if kind == "cpu":
        if not isinstance(indices, range) and any(indices):
            raise ValueError(
                f"Trainer(devices={devices!r}) lists device indices, but the CPU is a single device without an index. "
                "Pass devices=1."
            )
        return [torch.device("cpu")] * len(indices)
    if max(indices) >= present or min(indices) < 0 or len(set(indices)) != len(indices):
        variable = kind_of(kind).visible_variable
        visible = os.environ.get(variable) if variable is not None else None
        raise ValueError(
            f"Trainer(devices={devices!r}) asks for {kind.upper()} devices {list(indices)}, but this process sees "
            f"{present}{f' ({variable}={visible})' if visible is not None else ''}. "
            f"Set devices={present} or devices='auto', or make more devices visible."
        )
    return [torch.device(kind, index) if kind_of(kind).is_numbered else torch.device(kind) for index in indices]


def _integer(value: Any, given: Any) -> int:
    try:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError
        return int(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"Trainer: devices={given!r} is not a valid number of devices. Pass 2, '2', [0, 1], '0,1', -1 for all "
            "devices, or 'auto'."
        ) from None
