"""A process's measurements as plain data, for the findings and the JSON file."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..devices.kinds import kind_of
from ..processes.cpu_affinity import NODES, nodes, parse
from .step_clock import INDEX, PARTS, WHOLE

#: Number of warmup steps, which are not measured.
WARM_UP = 3
#: Maximum number of points in the step time chart.
MOST_POINTS = 2000


@dataclass
class Facts:
    """The measurements of one process in a run.

    Attributes:
        own_loop: whether the loop is the user's own, with an Accelerator, instead of a Trainer's.
        steps: number of measured batches, without the warmup in which memory is allocated and graphs are compiled.
        seconds: host seconds by part, over the measured steps; they add up to the elapsed time.
        device_seconds: device seconds by part, scaled to all measured steps; empty without a GPU.
        step_seconds: seconds of each measured step, sampled to at most :data:`MOST_POINTS` steps.
        run_seconds: seconds of the entire run.
        run_parts: seconds of the entire run, by part.
        often: number of measured steps in which a validation or a checkpoint took significant time.
        hooks: seconds by hook, such as ``"MyCallback.on_train_batch_end"``, over the measured steps, slowest first.
        communication: seconds of gradient communication per step: all of it (``all``), and the part that the backward
            pass did not hide (``exposed``); empty if not measured.
        operators: number of operators that a step calls; None if unknown.
    """

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    own_loop: bool = False
    strategy: str = ""
    device: str = "cpu"
    device_name: str = ""
    steps: int = 0
    updates: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    device_seconds: dict[str, float] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)
    run_seconds: float = 0.0
    run_parts: dict[str, float] = field(default_factory=dict)
    often: dict[str, int] = field(default_factory=dict)
    hooks: dict[str, float] = field(default_factory=dict)
    communication: dict[str, float] = field(default_factory=dict)
    operators: int | None = None
    batch_size: int | None = None
    accumulate: int = 1
    parameter_bytes: int = 0
    loader: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    recompilations: list[dict[str, Any]] = field(default_factory=list)
    collection_seconds: float = 0.0
    collections: int = 0
    cores: int = 1
    threads: int = 1
    memory: dict[str, float] = field(default_factory=dict)
    numa: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Total host seconds of all measured steps."""
        return sum(self.seconds.values())

    @property
    def step(self) -> float:
        """Average seconds per step."""
        return self.total / self.steps if self.steps else 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part, measured on the device if possible, with communication separated from backward."""
        parts = dict(self.device_seconds or self.seconds)
        exposed = min(self.exposed, parts.get("backward", 0.0))
        if exposed:
            parts["backward"] -= exposed
            parts["communication"] = parts.get("communication", 0.0) + exposed
        return parts

    @property
    def exposed(self) -> float:
        """Seconds of the measured steps in which this process only waited for gradients."""
        return self.communication.get("exposed", 0.0) * self.updates

    def share(self, *names: str) -> float:
        """Return the fraction of the measured time that the given parts took."""
        parts = self.parts
        whole = sum(parts.values())
        return sum(parts.get(name, 0.0) for name in names) / whole if whole else 0.0

    @property
    def compute(self) -> float:
        """Seconds per step spent in forward, backward and optimizer."""
        parts = self.parts
        return sum(parts.get(name, 0.0) for name in ("forward", "backward", "optimizer")) / max(self.steps, 1)

    @property
    def quick_step(self) -> float:
        """The 10th percentile of the step times in seconds, taken as the time of an undisturbed step."""
        times = sorted(self.step_seconds)
        return times[len(times) // 10] if times else 0.0

    @property
    def samples_per_second(self) -> float | None:
        """Number of samples that this process trains on per second."""
        return None if not self.batch_size or not self.step else self.batch_size / self.step


def from_rows(facts: Facts, rows: list[tuple[float, ...]], warm_up: int) -> None:
    """Fill in the times of the steps after the first ``warm_up`` steps, from a clock's rows."""
    count = len(PARTS)
    first = next((i for i, row in enumerate(rows) if row[count] >= warm_up), None)
    if first is None or rows[-1][count] - rows[first][count] < 1:
        return
    begun, ended = rows[first], rows[-1]
    facts.steps = int(ended[count] - begun[count])
    facts.seconds = {name: ended[i] - begun[i] for i, name in enumerate(PARTS)}
    times = [
        (sum(after[:count]) - sum(before[:count]))
        for before, after in pairwise(rows[first:])
        if after[count] > before[count]
    ]
    facts.step_seconds = times[:: -(-len(times) // MOST_POINTS)]
    worth = 0.1 * facts.quick_step
    facts.often = {
        name: sum(after[INDEX[name]] - before[INDEX[name]] > worth for before, after in pairwise(rows[first:]))
        for name in WHOLE
    }


# ---- the machine -----------------------------------------------------------------------------------------------------


def usable_cores() -> int:
    """Return the number of cores that this process may use, given its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


def memory_of(device: torch.device) -> dict[str, float]:
    """Return the total, used and available bytes of host and device memory, as far as they are known."""
    found: dict[str, float] = {}
    try:
        lines = Path("/proc/meminfo").read_text()
        for name, key in (("host_total", "MemTotal"), ("host_available", "MemAvailable")):
            match = re.search(rf"^{key}: +(\d+) kB", lines, re.MULTILINE)
            if match:
                found[name] = int(match.group(1)) * 1024.0
    except OSError:
        pass
    kind = kind_of(device)
    if kind.counts_memory():
        stats = kind.stats(device)
        found |= {
            "total": float(kind.total_memory(device) or 0),
            "peak_allocated": float(stats.get("allocated_bytes.all.peak", 0)),
            "peak_reserved": float(stats.get("reserved_bytes.all.peak", 0)),
            "retries": float(stats.get("num_alloc_retries", 0)),
        }
    return found


def numa_of(device: torch.device) -> dict[str, Any]:
    """Return a GPU's NUMA node, and how many of this process's cores are on it."""
    node = kind_of(device).numa_node(device)
    if node is None:
        return {}
    try:
        near = parse((NODES / f"node{node}" / "cpulist").read_text()) if node >= 0 else set[int]()
    except (OSError, ValueError):
        return {}
    mine = set().union(*nodes())
    return {"device_node": node, "nodes": len(nodes()), "near": len(mine & near), "cores": len(mine)}


def loader_facts(loader: Any) -> dict[str, Any]:
    """Return a loader's class and, if it is a DataLoader, its settings."""
    found: dict[str, Any] = {"kind": type(loader).__name__}
    if isinstance(loader, DataLoader):
        found |= {
            "num_workers": loader.num_workers,
            "pin_memory": bool(loader.pin_memory),
            "persistent_workers": bool(loader.persistent_workers),
            "prefetch_factor": loader.prefetch_factor,
            "batch_size": loader.batch_size,
            "data_set": type(loader.dataset).__name__,
        }
    return found
