"""Callback that logs device memory and machine load."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from .. import messages
from ..devices.kinds import kind_of
from .base import Callback

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer


class DeviceStatsMonitor(Callback):
    """Log device statistics after each training step for which the trainer logs step values.

    On CUDA and other accelerators, the statistics are the counters of PyTorch's allocator (bytes allocated and
    reserved, their peaks, retries, out-of-memory errors); on MPS, the allocated memory; and on a CPU, the machine's
    load and memory and this process's memory. Reading them does not wait for the device. Names look like
    ``DeviceStatsMonitor.on_train_batch_end/allocated_bytes.all.peak``.

    Args:
        cpu_stats: also log CPU statistics, which requires the psutil package. If None, they are logged only if the run
            uses the CPU and psutil is installed.
        filter_keys: log only these statistics (the part of the name after the slash); None logs all.

    Raises:
        RuntimeError: if the trainer has no logger when training starts.
        ModuleNotFoundError: if ``cpu_stats=True`` and psutil is not installed.
    """

    def __init__(self, cpu_stats: bool | None = None, filter_keys: Iterable[str] | None = None) -> None:
        if isinstance(filter_keys, str):
            raise TypeError(
                f"DeviceStatsMonitor: filter_keys={filter_keys!r} is a string, but must be a set of names. "
                f"Pass {{{filter_keys!r}}}."
            )
        if cpu_stats and _psutil() is None:
            raise ModuleNotFoundError(
                "DeviceStatsMonitor(cpu_stats=True) needs the psutil package, which is not installed. "
                "Run `pip install psutil`, or leave cpu_stats out."
            )
        self._cpu_stats = cpu_stats
        self._filter_keys = None if filter_keys is None else set(filter_keys)

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._require_logger(trainer)
        self._check_keys(self._read(trainer.strategy.device), trainer.strategy.device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.state.stepped:
            self._log(trainer, "on_train_batch_end")

    def _log(self, trainer: Trainer, hook: str) -> None:
        if trainer.logs_this_step:
            stats, wanted = self._read(trainer.strategy.device), self._filter_keys
            prefix = f"{type(self).__name__}.{hook}/"
            trainer.log_metrics({prefix + k: v for k, v in stats.items() if wanted is None or k in wanted})

    def _read(self, device: torch.device) -> dict[str, float]:
        stats = device_stats(device)
        cpu = device.type == "cpu" if self._cpu_stats is None else self._cpu_stats
        return {**stats, **cpu_stats()} if cpu and _psutil() is not None else stats

    def _check_keys(self, stats: dict[str, float], device: torch.device) -> None:
        """Warn if there are no statistics to log; raise if ``filter_keys`` contains an unknown name."""
        if not stats:
            messages.warn(
                f"DeviceStatsMonitor has nothing to report on device '{device}'. Run `pip install psutil` to log CPU "
                "statistics, or remove the callback."
            )
        for key in sorted(self._filter_keys or ()):
            if stats and key not in stats:
                raise ValueError(messages.unknown("DeviceStatsMonitor(filter_keys=...) key", key, stats))


def device_stats(device: torch.device) -> dict[str, float]:
    """Return a device's memory statistics, in bytes and counts; an empty dict for a CPU."""
    return kind_of(device).stats(device)


def cpu_stats() -> dict[str, float]:
    """Return the machine's load and memory in percent and this process's memory in bytes. Requires psutil."""
    psutil = _psutil()
    return {
        "cpu_percent": psutil.cpu_percent(),
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_swap_percent": psutil.swap_memory().percent,
        "process_rss_bytes": psutil.Process().memory_info().rss,
    }


def _psutil() -> Any:
    try:
        return importlib.import_module("psutil")
    except ModuleNotFoundError:
        return None
