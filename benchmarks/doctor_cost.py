"""What the doctor costs a step: fits with and without it, side by side in one process.

    python benchmarks/doctor_cost.py                     # a step of about 1 ms, and one of next to nothing
    python benchmarks/doctor_cost.py --rounds 15

A round makes a short fit of each kind in random order, on the same data, and times the steps after the doctor's warm-up
(where it looks at every operator) by what ticks in ``training_step``. The figures are the median over the rounds of the
difference of CPU times, +- its error (95 %); a second fit without shows what is noise.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import time
import warnings
from typing import Any

import torch
from measuring import machine, median_error, table
from torch import nn

from paceline import Trainer, TrainingModule
from paceline.doctor.doctor import Doctor

SKIPPED = 10


class Ticks(TrainingModule):
    """A network of some layers that notes when its step begins."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
        self.ticks: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ticks.append(time.process_time())
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def step_seconds(profiler: Any, width: int, depth: int, rows: int, steps: int) -> float:
    """CPU seconds of a step, on average."""
    torch.manual_seed(0)
    module, batch = Ticks(width, depth), torch.randn(rows, width)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        profiler=profiler,
    )
    trainer.fit(module, [batch] * (steps + SKIPPED + 1))
    return (module.ticks[-1] - module.ticks[SKIPPED]) / steps


def compare(
    width: int, depth: int, rows: int, steps: int, rounds: int
) -> tuple[float, tuple[float, float], tuple[float, float]]:
    """Microseconds: of a step, what the doctor adds with its error, and what a second fit without adds with its own."""
    kinds = {"without": lambda: None, "again": lambda: None, "doctor": lambda: Doctor(write=False)}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name in random.sample(list(kinds), len(kinds)):
            found[name].append(step_seconds(kinds[name](), width, depth, rows, steps))
    bare = found["without"]

    def added(name: str) -> tuple[float, float]:
        us = [1e6 * (cpu - base) for cpu, base in zip(found[name], bare, strict=True)]
        return statistics.median(us), median_error(us)

    return 1e6 * statistics.median(bare), added("doctor"), added("again")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    if arguments.rounds < 5:
        parser.error(f"--rounds {arguments.rounds} is too few for a median with an error. Take 5 or more.")
    torch.set_num_threads(1)
    random.seed(0)
    warnings.simplefilter("ignore")
    logging.getLogger("paceline").addHandler(logging.NullHandler())
    print(machine())
    rows = []
    for name, size in (("next to nothing", (8, 1, 4)), ("about 1 ms", (192, 4, 64))):
        step, *found = compare(*size, arguments.steps, arguments.rounds)
        rows.append([name, step, *(f"{us:.1f} +- {error:.1f} us = {100 * us / step:.1f} %" for us, error in found)])
    print(table(["step", "us without", "the doctor adds", "a second fit without adds"], rows))


if __name__ == "__main__":
    main()
