"""What the benchmarks share: the task, the clock that ticks inside ``forward``, statistics, tables.

Every framework calls ``forward`` once per batch. So the time between two ticks that are N batches apart is the cost of
N whole batches (fetch, forward, backward, update, and all that the framework adds), without start-up and tear-down, and
whatever a framework fetches ahead. A tick costs about 0.1 us; the hand-written loop pays it too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LR = 0.01
SEED = 7
LOG_EVERY = 50


@dataclass(frozen=True)
class Task:
    """One training (or evaluation) to time: ``steps`` batches after ``warmup``, in blocks of ``block``."""

    config: str = "off"
    steps: int = 2000
    warmup: int = 250
    block: int = 250
    tail: int = 10  # batches after the last mark, so that the end of the epoch falls outside
    accumulate: int = 1
    width: int = 32
    depth: int = 0
    batch_size: int = 8

    @property
    def batches(self) -> int:
        return self.warmup + self.steps + self.tail


class Clock:
    """Counts forwards; stamps wall and CPU time (all threads of the process) at the ends of the blocks."""

    def reset(self, task: Task) -> None:
        self.count = -1
        self.next, self.block, self.last = task.warmup, task.block, task.warmup + task.steps
        self.marks: list[tuple[float, float]] = []

    def tick(self) -> None:
        self.count += 1
        if self.count == self.next:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # what was asked for counts when it is done
            self.marks.append((time.perf_counter(), time.process_time()))
            self.next = self.count + self.block if self.count + self.block <= self.last else -1

    def microseconds(self) -> tuple[float, float]:
        """Wall and CPU time of a batch: the median over the blocks."""
        blocks = list(zip(self.marks, self.marks[1:], strict=False))
        wall, cpu = ([(b[i] - a[i]) / self.block * 1e6 for a, b in blocks] for i in (0, 1))
        return statistics.median(wall), statistics.median(cpu)


CLOCK = Clock()
CLOCK.reset(Task())


class Net(nn.Module):
    """``depth`` hidden layers (none: one linear layer); its forward ticks the clock."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        layers: list[nn.Module] = []
        for _ in range(task.depth):
            layers += [nn.Linear(task.width, task.width), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.Linear(task.width, 2)) if layers else nn.Linear(task.width, 2)

    def forward(self, x: Tensor) -> Tensor:
        CLOCK.tick()
        return self.body(x)


class Batches:
    """Ready batches, 64 different ones over and over: the cheapest loader there is, so that only the loop is timed."""

    def __init__(self, task: Task) -> None:
        generator = torch.Generator().manual_seed(SEED)
        x = torch.randn(64, task.batch_size, task.width, generator=generator)
        y = torch.randn(64, task.batch_size, 2, generator=generator)
        self.batches = [(x[i % 64], y[i % 64]) for i in range(task.batches)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every contestant."""
    return torch.optim.SGD(module.parameters(), lr=LR)


def example(name: str) -> Any:
    """One of the examples as a module, by the name of its file."""
    path = Path(__file__).resolve().parent.parent / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name[3:], path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[name[3:]] = module  # where torch's compiler looks for what it traces
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def checksum(module: nn.Module) -> float:
    """Differs when weights differ: who has done other work has been timed for nothing."""
    return sum(p.detach().double().abs().sum().item() for p in module.parameters())


def rss_mb(field: str = "VmRSS") -> float:
    """Resident memory of this process from /proc (``VmHWM``: its peak), MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    return float("nan")


def spread(values: Sequence[float]) -> float:
    """Half the range between the quartiles: how much of a difference is noise."""
    if len(values) < 3:
        return (max(values) - min(values)) / 2
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return (quartiles[2] - quartiles[0]) / 2


def median_error(values: Sequence[float]) -> float:
    """The error of a median, 95 %: 1.82 times the range between the quartiles over the root of the number of values."""
    return 1.82 * 2 * spread(values) / len(values) ** 0.5


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table that also reads well in a terminal."""
    cells = [[f"{c:.1f}" if isinstance(c, float) else "-" if c is None else str(c) for c in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return (
            "| "
            + " | ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            + " |"
        )

    rule = "|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([line(list(header)), rule, *map(line, cells)])


def machine() -> str:
    """One line about where this was measured."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    cpu = models[0] if models else platform.machine()
    return f"{cpu}, {os.cpu_count()} cores, {versions}, {time.strftime('%Y-%m-%d')}"


def progress(text: str) -> None:
    """A line on standard error, so that standard output is the table alone."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def quiet_environment() -> dict[str, str]:
    """The environment of a measured process: one thread, no network, no warnings."""
    quiet = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    # An installed package has its bytecode; a checkout gets it in the first process that imports it.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, **quiet, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}


def in_fresh_process(*arguments: object, **variables: str) -> Any:
    """Run Python with ``arguments``, and with more environment variables; return its last line, which is JSON."""
    command, environment = [sys.executable, *map(str, arguments)], {**quiet_environment(), **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no answer"])[-1])
    return json.loads(done.stdout.splitlines()[-1])
